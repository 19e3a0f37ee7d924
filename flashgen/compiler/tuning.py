"""`flashgen.tune`, and `compile(tune="auto")`: the public side of the tuner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flashgen import settings
from flashgen.compiler.arguments import (
    family_argument,
    shape_argument,
    spec_argument,
    target_argument,
)
from flashgen.compiler.choose import check_served, target_of
from flashgen.errors import FlashgenError, TuningError
from flashgen.problem import Problem
from flashgen.runtime.launch import Attention, Guard, PlanFor
from flashgen.runtime.said import say_once
from flashgen.schedule.families import FAMILIES
from flashgen.schedule.model import Bucket, bucket_of
from flashgen.spec.model import AttentionSpec
from flashgen.spec.parts import Shape
from flashgen.target import Target
from flashgen.tune import lookup
from flashgen.tune.drift import Drift, check_table
from flashgen.tune.search import Limits
from flashgen.tune.session import (
    MakeMeasurer,
    Report,
    Request,
    Result,
    cases_of,
    cases_with,
    tune_case,
)
from flashgen.tune.storage import need_optuna
from flashgen.tune.strategies import SAMPLERS
from flashgen.tune.study import Case
from flashgen.tune.table import Table, read_table, table_path
from flashgen.tune.toolchain import Device, device_here

if TYPE_CHECKING:
    from flashgen.runtime.check import Sizes
    from flashgen.runtime.repeat import Seen
    from flashgen.tune.measurement import Measurer

AUTO_SECONDS = 30.0  # what a call may wait for its own tuning


@dataclass(frozen=True)
class Tuning:
    """What `tune` found: a result for each shape bucket, and the table that holds them."""

    spec: AttentionSpec
    target: Target
    path: Path
    results: tuple[Result, ...]

    @property
    def table(self) -> Table | None:
        """The table as it is now; None: nothing was written."""
        return read_table(self.path) if self.path.is_file() else None

    def to_dict(self) -> dict[str, object]:
        """JSON types."""
        return {
            "spec": self.spec.display_name,
            "fingerprint": self.spec.fingerprint,
            "gpu": self.target.id,
            "table": str(self.path),
            "results": [result.to_dict() for result in self.results],
        }


def tune(
    spec: AttentionSpec,
    *,
    target: str | Target | None = None,
    shapes: Sequence[Shape | Mapping[str, int]] | None = None,
    seconds: float = Limits.seconds,
    trials: int | None = None,
    devices: str | Sequence[int] | None = None,
    storage: str | None = None,
    sampler: str = "model",
    family: str | None = None,
    out: str | Path | None = None,
    retry_failed: bool = False,
    write: bool = True,
    report: Report | None = None,
    make_measurer: MakeMeasurer | None = None,
) -> Tuning:
    """Find the fastest schedule for each shape bucket of `spec` on the GPU here, and keep it.

    shapes: instead of the spec's; seconds: for each bucket; trials: at most so many schedules a
    bucket, earlier runs' included (None: a fifth of the space); devices: numbers of GPUs or "all"
    (None: the current one); storage: where trials are kept (a journal file, a folder,
    postgresql://… or grpc://…; None: the user's cache); out: the folder of tables (None: the
    user's); sampler: "model", "tpe" or "random"; family: "triton" or "gluon_sm90", the only one
    whose schedules are searched, beside the untuned choice (None: all that the GPU runs); buckets
    for which it has none are left out, which is said; retry_failed: try schedules again that failed
    or did not compile; write: whether the table is written. Ctrl-C keeps the best so far and raises
    KeyboardInterrupt.

    Raises TuningError where nothing can be tuned, none of the family's schedules can be had, or
    trials cannot be kept, NotServedError,
    TargetError, TableError where the table cannot be written.
    """
    check_served(spec_argument("tune", spec))
    if sampler not in SAMPLERS:
        raise FlashgenError(f"sampler: got {sampler!r}, expected one of {', '.join(SAMPLERS)}")
    chosen_family = family_argument(family)
    need_optuna()
    numbers = _devices(devices) if make_measurer is None else _numbers(devices)
    chosen = target_argument(target) or target_of(_first(numbers, make_measurer))
    device = device_here(numbers[0]) if make_measurer is None else Device.of_target(chosen)
    problem = Problem(spec, chosen)
    checked = [shape_argument(spec, s) for s in shapes] if shapes is not None else None
    request = Request(
        limits=Limits(seconds=seconds, trials=trials),
        devices=numbers,
        storage=storage,
        sampler=sampler,
        out=Path(out) if out is not None else None,
        retry_failed=retry_failed,
        exclusive=settings.in_job(),
        write=write,
        families=FAMILIES if chosen_family is None else (chosen_family,),
    )
    cases = cases_of(problem, device, checked)
    if chosen_family is not None:
        cases = cases_with(problem, cases, chosen_family)
    return _tuned(problem, cases, request, make_measurer, report)


def _tuned(
    problem: Problem,
    cases: Sequence[Case],
    request: Request,
    make_measurer: MakeMeasurer | None,
    report: Report | None,
) -> Tuning:
    if make_measurer is None:
        from flashgen.tune.measure import kept_workers

        with kept_workers():  # processes with torch and a CUDA context serve all cases
            return _tuned(problem, cases, request, on_gpu(problem), report)
    results: list[Result] = []
    path = table_path(request.out or settings.user_tables_dir(), problem.target.id, problem.name)
    for case in cases:
        result = tune_case(
            problem,
            case,
            request,
            make_measurer,
            report or (lambda case, progress: None),
        )
        results.append(result)
        found = result.outcome
        if found is not None and found.interrupted:
            raise TuningInterrupted(Tuning(problem.spec, problem.target, path, tuple(results)))
        if found is not None and found.error is not None:
            raise TuningError(f"{found.error}\n  {best_so_far(result)}") from found.error
    return Tuning(problem.spec, problem.target, path, tuple(results))


def table_of(
    spec: AttentionSpec, *, target: str | Target | None = None, out: str | Path | None = None
) -> Table:
    """The table of `spec` in the folder `out`; None: in the first folder that has one.

    TableError: there is none, or it cannot be read.
    """
    chosen = target_argument(target) or target_of(_here())
    if out is None:
        lookup.check_folder()
    folders = [Path(out)] if out is not None else list(lookup.folders())
    paths = [table_path(folder, chosen.id, spec.display_name) for folder in folders]
    return read_table(next((path for path in paths if path.is_file()), paths[-1]))


def check_entries(
    spec: AttentionSpec,
    *,
    target: str | Target | None = None,
    out: str | Path | None = None,
    devices: str | Sequence[int] | None = None,
    progress: Callable[[str], None] = lambda step: None,
    make_measurer: MakeMeasurer | None = None,
) -> tuple[Drift, ...]:
    """Time the entries of a table (`table_of`) again, against the untuned choice."""
    check_served(spec_argument("check_entries", spec))
    numbers = _devices(devices) if make_measurer is None else _numbers(devices)
    chosen = target_argument(target) or target_of(_first(numbers, make_measurer))
    table = table_of(spec, target=chosen, out=out)
    if table.fingerprint != spec.fingerprint:
        raise TuningError(
            f"{spec.display_name}: the spec changed since its table was written\n"
            f"  hint: `flashgen tune {spec.display_name}` writes a new one."
        )
    device = device_here(numbers[0]) if make_measurer is None else Device.of_target(chosen)
    problem = Problem(spec, chosen)
    found: list[Drift] = []
    for number, entry in enumerate(table.entries, 1):
        progress(f"checking {number} of {len(table.entries)}: {entry.place}")
        one = Table(table.spec, table.fingerprint, table.gpu, (entry,))
        measurers = make_measurer or on_gpu(problem)
        found += check_table(one, problem, device, measurers, devices=numbers)
    return tuple(found)


def _here() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class TuningInterrupted(KeyboardInterrupt):
    """Ctrl-C while tuning; `tuning` has what was found until then, which is in the table."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        super().__init__(best_so_far(tuning.results[-1]))


def best_so_far(result: Result) -> str:
    """One sentence for who ends early."""
    if result.entry is None:
        return f"{result.case.bucket}: nothing was timed yet"
    entry = result.entry
    return f"{result.case.bucket}: best so far {entry.schedule}, {entry.time_us:.4g} us, is kept"


def on_gpu(problem: Problem) -> MakeMeasurer:
    """Measurers on the GPUs here."""

    def make(case: Case, devices: tuple[int, ...]) -> Measurer:
        from flashgen.tune.measure import gpu_measurer

        return gpu_measurer(problem.spec, case.shape, problem.target, devices=devices)

    return make


def _first(numbers: tuple[int, ...], make_measurer: MakeMeasurer | None) -> torch.device:
    return torch.device("cuda", numbers[0]) if make_measurer is None else torch.device("cpu")


def _numbers(devices: str | Sequence[int] | None) -> tuple[int, ...]:
    return tuple(devices) if isinstance(devices, (list, tuple)) and devices else (0,)


def _devices(devices: str | Sequence[int] | None) -> tuple[int, ...]:
    """Numbers of GPUs that are there and alike."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise TuningError(
            "tuning measures on a GPU, and PyTorch sees none\n"
            "  hint: `flashgen doctor` says what is installed and which GPU is there."
        )
    if devices is None:
        return (torch.cuda.current_device(),)
    numbers = tuple(range(count)) if devices == "all" else _numbers(devices)
    if isinstance(devices, str) and devices != "all":
        raise TuningError(f"devices: got {devices!r}, expected all or numbers of GPUs")
    missing = [number for number in numbers if not 0 <= number < count]
    if missing:
        raise TuningError(f"devices: no GPU {missing[0]}; there are 0 to {count - 1}")
    names = {torch.cuda.get_device_name(number) for number in numbers}
    if len(names) > 1:
        raise TuningError(
            f"devices: different GPUs ({', '.join(sorted(names))}) cannot share a table\n"
            "  hint: tune each kind by itself: --devices 0"
        )
    return numbers


# **** compile(tune="auto") ****

MODES = ("auto",)


class SelfTuning(Attention):
    """An attention that tunes at the first call of each shape bucket without a tuned config.

    Never while a CUDA graph is captured, never when frozen: there the plan as it is serves the
    call. What another process has tuned meanwhile is taken.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        plan_for: PlanFor,
        *,
        return_lse: bool,
        target: Target | None = None,
        tuner: Callable[[Problem, Bucket, Shape, int], object] | None = None,
        guard: Guard | None = None,
    ) -> None:
        super().__init__(spec, plan_for, return_lse=return_lse, guard=guard)
        self._target = target
        self._tuner = tuner or tune_for_call
        self._settled: set[tuple[torch.device, Bucket]] = set()

    def launch(self, sizes: Sizes, q: torch.Tensor, *others: Any) -> Seen | None:
        """As `Attention.launch`, after tuning where that is still to be done."""
        bucket = bucket_of(sizes.q_len, sizes.kv_len)
        if (q.device, bucket) not in self._settled and self._may_tune(q.device):
            with self._lock:
                if (q.device, bucket) not in self._settled:
                    self._settle(sizes, q.device, bucket)
        return super().launch(sizes, q, *others)

    def _is_final(self, sizes: Sizes, device: torch.device) -> bool:
        """Not before it was decided whether to tune: a call in a capture decides nothing."""
        return (device, bucket_of(sizes.q_len, sizes.kv_len)) in self._settled

    def _may_tune(self, device: torch.device) -> bool:
        from flashgen.runtime.frozen import is_frozen

        if device.type != "cuda" or is_frozen():
            return False
        if torch.cuda.is_current_stream_capturing():
            say_once(
                f"{self.spec.display_name}: a CUDA graph is being captured, so nothing is tuned\n"
                "  hint: make one call with these lengths before the capture."
            )
            return False
        return True

    def _settle(self, sizes: Sizes, device: torch.device, bucket: Bucket) -> None:
        """Tune, or not: either way once. A search that fails leaves the plan as it was."""
        self._settled.add((device, bucket))
        target = self._target or target_of(device)
        plan, _ = self._plan_for(device)
        origins = dict(zip((b for b, _ in plan.choices), plan.origins, strict=True))
        if origins.get(bucket) in {"tuned", "given"}:
            return
        shape = Shape(
            batch=sizes.batch,
            q_heads=sizes.num_q_heads,
            kv_heads=sizes.num_kv_heads,
            q_len=sizes.q_len,
            kv_len=sizes.kv_len,
        )
        try:
            self._tuner(Problem(self.spec, target), bucket, shape, device.index or 0)
        except FlashgenError as error:
            say_once(f"{self.spec.display_name}: not tuned for {bucket}: {error}")
        lookup.forget()
        self._loaded.pop(device, None)  # the plan is another one now


def tune_for_call(problem: Problem, bucket: Bucket, shape: Shape, device: int) -> object:
    """One bucket for a call that waits: short, and of several processes one tunes."""
    need_optuna()
    request = Request(limits=Limits(seconds=AUTO_SECONDS), devices=(device,), exclusive=True)
    (case,) = cases_of(problem, device_here(device), [shape])
    return _tuned(problem, [case], request, None, None)


def mode_argument(tune: object) -> str | None:
    """`compile`'s argument `tune`, if it is one."""
    if tune is not None and tune not in MODES:
        raise FlashgenError(
            f"tune: got {tune!r}, expected 'auto' or None\n"
            "  hint: flashgen.tune(spec) tunes now; compile takes what it found."
        )
    return "auto" if tune else None

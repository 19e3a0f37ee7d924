"""The callable: check the tensors, choose a schedule by their lengths, launch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from flashgen.dtypes import get_dtype
from flashgen.errors import TensorError
from flashgen.haste import in_haste
from flashgen.runtime.artifact import Plan
from flashgen.runtime.check import Sizes, check_call
from flashgen.runtime.frozen import not_compiling
from flashgen.runtime.launcher import start_preparing_launch
from flashgen.runtime.load import load_module
from flashgen.runtime.repeat import MAX_KEPT, Repeat, Seen, Signature, repeat_of, signature
from flashgen.runtime.said import say_once
from flashgen.runtime.served import served
from flashgen.runtime.triton_cache import checked_entries, use_writable_cache
from flashgen.runtime.warm import start_warming
from flashgen.schedule.model import HOPPER, Bucket, Schedule, bucket_of
from flashgen.spec.model import AttentionSpec

if TYPE_CHECKING:
    from flashgen.codegen.options import Option

MAX_PROGRAMS = 2**31 - 1  # CUDA: grid dimension x, all compute capabilities
PlanFor = Callable[[torch.device], tuple[Plan, Path]]
# Whether a Hopper schedule of a plan may be launched in this process. Where it says no, the next
# plan has another schedule in its place.
Guard = Callable[[torch.device, Plan, Path, Schedule, Sizes], bool]
Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Loaded:
    """A plan on one device: its module and, for each bucket, kernel and launch options."""

    plan: Plan
    module: ModuleType
    launches: Mapping[Bucket, tuple[Schedule, object, Mapping[str, Option]]]

    @property
    def path(self) -> Path:
        """The module's file."""
        return Path(str(self.module.__file__))


class Attention:
    """A compiled attention: `(q, k, v, *, <inputs>, sink=, kv_lens=) -> out` or `(out, lse)`.

    q, k, v: [batch, heads, len, dim] (layout bshd: [batch, len, heads, dim]), any strides, on any
    GPU, or on the CPU, where Triton's interpreter runs the same kernels. out has q's layout and is
    contiguous; lse is [batch, q_heads, q_len], fp32, natural logarithm. Raises TensorError for
    arguments that do not fit the spec. Kernels compile at the first call that needs them.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        plan_for: PlanFor,
        *,
        return_lse: bool,
        guard: Guard | None = None,
        emulated: bool = False,
    ) -> None:
        """emulated: CPU tensors run the kernels of Hopper schedules, not those beside them."""
        self.spec = spec
        self._emulated = emulated
        self.return_lse = return_lse
        self._plan_for = plan_for
        self._guard = guard
        self._allowed: set[tuple[torch.device, Schedule]] = set()
        self._not_tma: str | None = None
        self._loaded: dict[torch.device, Loaded] = {}
        self._lock = threading.RLock()
        self._repeats: dict[Signature, Repeat] = {}

    def __repr__(self) -> str:
        return f"Attention({self.spec.display_name}, return_lse={self.return_lse})"

    def __call__(
        self, /, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **others: Any
    ) -> Result:
        try:
            key = signature(q, k, v, others)
            repeat = self._repeats.get(key)
        except Exception:  # something that is no plain tensor: the checks say what
            key = repeat = None
        if repeat is not None:
            return repeat(q, k, v, others)
        return self._first(key, q, k, v, others)

    def _first(
        self,
        key: Signature,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        others: Mapping[str, Any],
    ) -> Result:
        """A call with a signature that was not met before, or that cannot be repeated."""
        sizes = check_call(self.spec, q, k, v, others)
        out, lse = self.empty_outputs(sizes, q)
        if not self._on_gpu(q.device):
            say_once(
                "q is on the CPU: the kernel runs in Triton's interpreter, which is slow and "
                "computes bf16 in fp32. Move the tensors to a GPU for speed.",
                inside=1,
            )
            self._interpret(sizes, q, k, v, others, out, lse)
        else:
            seen = self.launch(sizes, q, k, v, others, out, lse)
            if seen is not None and key is not None and self._is_final(sizes, q.device):
                tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **others}
                self._keep(key, repeat_of(self.spec, seen, tensors, returns_lse=self.return_lse))
        return (out, lse) if self.return_lse else out

    def _keep(self, key: Signature, repeat: Repeat | None) -> None:
        if repeat is None:
            return
        if len(self._repeats) >= MAX_KEPT:
            self._repeats.clear()
        self._repeats[key] = repeat

    @staticmethod
    def _on_gpu(device: torch.device) -> bool:
        return device.type != "cpu"

    def _is_final(self, sizes: Sizes, device: torch.device) -> bool:
        """Whether calls like this one will always be launched as they are now."""
        return True

    def empty_outputs(self, sizes: Sizes, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialised out (contiguous, in q's layout) and lse."""
        out_dtype = getattr(torch, get_dtype(self.spec.dtype.out).torch_name)
        out = torch.empty(*q.shape[:3], self.spec.head_dim.v, dtype=out_dtype, device=q.device)
        rows = (sizes.batch, sizes.num_q_heads, sizes.q_len) if self.return_lse else (0,)
        return out, torch.empty(rows, dtype=torch.float32, device=q.device)

    def launch(
        self,
        sizes: Sizes,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        others: Mapping[str, object],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Seen | None:
        """Fill out and lse; None: nothing was launched, because they are empty.

        FrozenError where a kernel would have to be compiled and that is refused.
        """
        if out.numel() == 0 and sizes.batch * sizes.num_q_heads * sizes.q_len == 0:
            return None
        bucket = bucket_of(sizes.q_len, sizes.kv_len)
        loaded = self._usable(q.device, bucket, sizes)
        schedule, kernel, options = loaded.launches[bucket]
        heads = schedule.tile_heads(sizes.num_q_heads, sizes.num_kv_heads)
        programs = -(-sizes.q_len // schedule.positions) * heads * sizes.batch
        if programs > MAX_PROGRAMS:
            raise TensorError("q", f"{programs} query tiles", f"at most {MAX_PROGRAMS} in one call")
        arguments = [others[name] for name in loaded.plan.arguments]
        outputs = (out, lse) if self.return_lse else (out,)
        what = f"compile {self.spec.display_name} for {q.device}, {bucket}"
        seen = Seen(kernel)
        # Triton compiles at the first launch of a variant, and that is not thread safe.
        with self._lock, _device(q.device), not_compiling(what), checked_entries():
            loaded.module.run(seen, options, q, k, v, *arguments, *outputs)
        if schedule.family == HOPPER and not seen.launches and self._on_gpu(q.device):
            self._say_not_tma(loaded, {"q": q, "k": k, "v": v, "out": out}, others)
        return seen

    def _usable(self, device: torch.device, bucket: Bucket, sizes: Sizes) -> Loaded:
        """The plan, with a schedule for `bucket` that the guard lets pass."""
        loaded = self._on(device)
        while True:
            schedule = loaded.launches[bucket][0]
            if schedule.family != HOPPER or self._guard is None or not self._on_gpu(device):
                return loaded
            if (device, schedule) in self._allowed:
                return loaded
            with self._lock:
                if self._guard(device, loaded.plan, loaded.path, schedule, sizes):
                    self._allowed.add((device, schedule))
                    return loaded
                self._loaded.pop(device, None)  # the plan is another one now
                loaded = self._on(device)

    def _say_not_tma(
        self, loaded: Loaded, tensors: dict[str, torch.Tensor], others: Mapping[str, Any]
    ) -> None:
        """Once, which tensor made the module's host code take the portable kernel."""
        from flashgen.passes.score_tile import score_tile

        tile = score_tile(self.spec)
        if tile is not None:
            tensors |= {tile.tensor.name: others[tile.tensor.name]}
        if self._not_tma is not None or any(not tensor.numel() for tensor in tensors.values()):
            return
        name = next(n for n, tensor in tensors.items() if not loaded.module.fits_tma(tensor))
        self._not_tma = (
            f"{name} has strides {tuple(tensors[name].stride())} or a start that TMA cannot take "
            "(rows contiguous, all else in steps of 16 bytes, none of 0); family triton serves "
            "such calls"
        )
        say_once(f"{self.spec.display_name}: {self._not_tma}")

    def report(self) -> str:
        """Which schedule of which family serves which lengths on the devices that were called, who
        chose it, and what stands in the way of others."""
        lines = [f"{self.spec.display_name}:"]
        for device, loaded in self._loaded.items():
            for (schedule, origin), areas in served(loaded.plan).items():
                tile = str(schedule).removeprefix(f"{schedule.family} ")
                where = f"{'; '.join(areas)} ({origin})"
                lines.append(f"  {device}: family {schedule.family}, {tile}: {where}")
            notes = (note.replace("\n", "\n  ") for note in loaded.plan.notes)
            lines += [f"  {device}: {note}" for note in notes]
        if self._not_tma is not None:
            lines.append(f"  {self._not_tma}")
        if len(lines) == 1:
            lines.append("  not called yet: schedules are chosen at the first call on a device")
        return "\n".join(lines)

    def _on(self, device: torch.device) -> Loaded:
        loaded = self._loaded.get(device)
        if loaded is None:
            with self._lock:
                loaded = self._loaded.get(device)
                if loaded is None:
                    with in_haste():
                        loaded = self._load(device)
                self._loaded[device] = loaded
        return loaded

    def _load(self, device: torch.device) -> Loaded:
        from flashgen.codegen.options import kernel_kinds, options

        on_gpu = self._on_gpu(device)
        if on_gpu:
            self._say_where_machine_code_goes()
            warming = start_warming()
        plan, path = self._plan_for(device)
        module = load_module(path, interpreted=not on_gpu, emulated=self._emulated and not on_gpu)
        entries = dict(plan.entries)
        if on_gpu:
            warming.join()
            kernels = [getattr(module, name) for name in entries.values()]
            start_preparing_launch(kernels, self.spec)
        launches = {
            bucket: (
                schedule,
                getattr(module, entries[kernel_kinds(schedule)[0]]),
                options(schedule),
            )
            for bucket, schedule in plan.choices
        }
        return Loaded(plan, module, launches)

    @staticmethod
    def _say_where_machine_code_goes() -> None:
        warning = use_writable_cache()
        if warning:
            say_once(warning)

    def _interpret(
        self,
        sizes: Sizes,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        others: Mapping[str, object],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """The same kernels on the CPU; bf16 in fp32, since interpreted tl.dot is wrong in it."""
        wide_out = out.float() if out.dtype == torch.bfloat16 else out
        wide = {name: _widened(value) for name, value in others.items()}
        self.interpret(sizes, _widened(q), _widened(k), _widened(v), wide, wide_out, lse)
        if wide_out is not out:
            out.copy_(wide_out)

    def interpret(
        self,
        sizes: Sizes,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        others: Mapping[str, object],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """As `launch`, in Triton's interpreter, for CPU tensors; none of them may be bf16."""
        from flashgen.runtime.interpret import check_interpreter, interpreting

        check_interpreter()
        with interpreting():
            self.launch(sizes, q, k, v, others, out, lse)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        return value.float()
    return value


def _device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current, at no cost where it is."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)

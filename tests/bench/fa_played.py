"""A run of suite `fa-paper` whose processes are played: nothing is compiled, times are made up."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashgen.bench.fa_cases import FA3, FLEX
from flashgen.bench.fa_suite import run_fa
from flashgen.bench.fa_tasks import CeilingsTask, CheckTask, CompileTask, SettleTask, TimeTask
from flashgen.bench.record import CaseRecord, Ceiling, Record, Result
from flashgen.bench.run import Run
from flashgen.target import get_target
from flashgen.tune.ahead import Compiled
from flashgen.tune.summary import summarise

H200 = get_target("nvidia-h200")
RECORD = Record("fa-paper", "nvidia-h200", {"gpu": "none"}, "flashgen bench", "2026-11-30")


class Helper:
    """Compiles nothing; what `bad` names does not compile."""

    def __init__(self, bad: str = "nothing", error: str = "spills") -> None:
        self.bad, self.error = bad, error

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, jobs: Any) -> None:
        pass

    def wait_for(self, jobs: Any, until: float) -> dict[Any, Compiled]:
        return {
            job: Compiled(1.0, error=self.error if self.bad in str(job.schedule) else None)
            for job in jobs
        }


class Player:
    """Answers as a process would; `behaviour` says what becomes of a task."""

    def __init__(self, behaviour: Callable[[object], Any]) -> None:
        self.behaviour = behaviour

    def ask(self, task: object, until: float) -> Any:
        return self.behaviour(task)

    def close(self) -> None:
        pass


PEERS_MS = {"sdpa_flash": 3.0, "sdpa_cudnn": 1.3, FA3: 1.2, FLEX: 2.0, "fa3 plain causal": 1.1}


def made_up_ms(name: str) -> float:
    """Ours take 1 ms and up to a fifth more."""
    return PEERS_MS.get(name, 1 + zlib.crc32(name.encode()) % 100 / 500)


def answer(task: object) -> Any:
    """Everything is right; times are made up from the names."""
    if isinstance(task, CeilingsTask):
        return (Ceiling("matmul bf16", "TFLOP/s", (800.0,)), Ceiling("copy", "TB/s", (4.3,)))
    if isinstance(task, CheckTask):
        return {}
    if isinstance(task, CompileTask):
        return len(task.cases)
    if isinstance(task, SettleTask):
        return dict.fromkeys(task.names, 1.25)
    assert isinstance(task, TimeTask)
    case = task.case
    names = [each.name for each in task.ours] + [
        name for name in (*PEERS_MS, *(o.name for o in task.outside)) if name not in task.skip
    ]
    flops = 10**12
    return CaseRecord(
        id=case.id,
        group=case.group,
        spec=case.spec.display_name,
        shape=asdict(case.shape),
        dtype="bf16",
        matmul_flops=flops,
        results=tuple(
            Result(name, ms=summarise([ms]), samples_ms=(ms,) * task.rounds)
            for name, ms in zip(names, map(made_up_ms, names), strict=True)
        ),
        facts={"plain flops": 2 * flops, "schedules": {}},
    )


def a_run(
    tmp_path: Path, behaviour: Callable[[object], Any] = answer, **more: Any
) -> tuple[Run, list[str]]:
    said: list[str] = []
    bad, error = more.pop("bad", "nothing"), more.pop("error", "spills")
    gpus = more.pop("gpus", ["0"])
    record, outside = more.pop("record", RECORD), more.pop("outside", ())
    options = {"budget_s": 1e5, "only": ("d128/n8192",)} | more
    run = Run(record, said.append, out=tmp_path, **options)
    run_fa(
        run,
        H200,
        gpus,
        outside=outside,
        start=lambda gpu, environment: Player(behaviour),
        compiling=lambda: Helper(bad, error),  # type: ignore[arg-type, return-value]
    )
    run.finish()
    return run, said

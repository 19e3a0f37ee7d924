"""The gluon_sm90 family's first run on a GPU: `python -m flashgen.bench.gluon_first --out DIR`.

Every schedule of every variant compiles and runs in a process of its own, which is killed when it
says nothing for too long: a wrong barrier hangs a GPU process for ever. What is right against the
fp64 oracle, plain attention only, is then timed beside SDPA's cuDNN back end.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flashgen.bench.gluon_variants import HEAD_DIMS, SHAPES, VARIANTS, Variant
from flashgen.tune.processes import Child, ChildEndedError

if TYPE_CHECKING:
    from flashgen.runtime.launch import Attention
    from flashgen.runtime.repeat import Seen

COMPILE_S = 150.0  # without a word, while importing and compiling
STEP_S = 25.0  # without a word, between calls
TIMING_SHARE = 0.35  # of the time, kept for timing
WORKERS = 6  # processes at a time while nothing is timed
STRIDES: tuple[Literal["plain", "transposed"], ...] = ("plain", "transposed")
LENGTHS = (512, 2048, 16384)
VARIANT_LENGTHS = (4096,)
TOKENS, HIDDEN = 16384, 2048


@dataclass
class Job:
    """A process and what it has said so far. `task` is what `serve` is asked for."""

    name: str
    task: dict[str, Any]
    child: Child | None = None
    heard: float = 0.0
    limit_s: float = COMPILE_S
    said: list[Any] = field(default_factory=list)
    step: str = "starting"
    error: str = ""

    def start(self) -> None:
        self.child = Child("flashgen.bench.gluon_first:serve")
        self.child.send(self.task)
        self.heard = time.monotonic()

    def listen(self) -> bool:
        """Take in one message; False when the process is done or gone."""
        assert self.child is not None
        try:
            kind, value = self.child.receive()
        except ChildEndedError as error:
            self.error = str(error)
            return False
        self.heard = time.monotonic()
        if kind == "step":
            self.step = value["step"]
            self.limit_s = value["limit_s"]
        elif kind == "error":
            self.error = value
        elif kind == "result":
            self.said.append(value)
        return bool(kind != "end")

    def is_late(self) -> bool:
        late = time.monotonic() - self.heard > self.limit_s
        if late:
            self.error = f"killed: nothing for {self.limit_s:.0f} s while {self.step}"
        return late


def run_jobs(jobs: Sequence[Job], workers: int, end: float) -> Iterator[Job]:
    """Each job when it has ended, in whatever way; those not begun at `end` are left out."""
    waiting, running = list(jobs), list[Job]()
    while waiting or running:
        while waiting and len(running) < workers and time.monotonic() < end:
            job = waiting.pop(0)
            job.start()
            running.append(job)
        if not running:
            return
        ready = wait([job.child.channel for job in running if job.child], timeout=0.5)
        for job in list(running):
            assert job.child is not None
            goes_on = job.listen() if job.child.channel in ready else True
            if not goes_on or job.is_late():
                job.child.kill()
                running.remove(job)
                yield job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for gluon_first.json, .md")
    parser.add_argument("--seconds", type=float, default=420, help="begin nothing later")
    parser.add_argument("--only", action="append", help="variants with this in their name")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--device", default="cuda", help="cpu: only the portable kernels run")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    chosen = [v for v in VARIANTS if not options.only or any(o in v.name for o in options.only)]
    options.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"checks": [], "timings": []}
    right: dict[str, list[int]] = {}
    jobs = check_jobs(chosen, options.device)
    last = end if options.no_timing else end - TIMING_SHARE * options.seconds
    for job in run_jobs(jobs, WORKERS, last):
        found = _checked(job)
        record["checks"].append(found)
        print(_check_line(found), flush=True)
        if found["ok"]:
            right.setdefault(job.task["variant"], []).append(job.task["schedule"])
        _write(options.out, record)
    late = [job.name for job in jobs if job.child is None]
    if late:
        print(f"not begun, for lack of time: {', '.join(late)}", flush=True)
    if not options.no_timing:
        for job in run_jobs(list(_timing_jobs(right, options.device)), 1, end):
            record["timings"] += job.said
            for each in job.said:
                print(_timing_line(each), flush=True)
            if job.error:
                print(f"{job.name}: {job.error}", flush=True)
            _write(options.out, record)


def check_jobs(chosen: Sequence[Variant], device: str) -> list[Job]:
    """The first schedule of every variant, then the second ones, and so on."""
    numbered = [(n, v) for v in chosen for n in range(len(v.schedules))]
    return [
        Job(
            f"{variant.name} [{variant.schedules[number]}]",
            {"what": "check", "variant": variant.name, "schedule": number, "device": device},
        )
        for number, variant in sorted(numbered, key=lambda each: each[0])
    ]


def _timing_jobs(right: dict[str, list[int]], device: str) -> Iterator[Job]:
    plain = [f"plain-d{dim}{mask}" for dim in HEAD_DIMS for mask in ("", "-causal")]
    for name in (*plain, *(v.name for v in VARIANTS if not v.plain)):
        if right.get(name):
            task = {"what": "time", "variant": name, "schedules": sorted(right[name])}
            yield Job(f"timing {name}", {**task, "device": device})


def _checked(job: Job) -> dict[str, Any]:
    cases = [each for each in job.said if "case" in each]
    facts = {key: value for each in job.said if "case" not in each for key, value in each.items()}
    ok = bool(cases) and not job.error and all(case["ok"] for case in cases if not case["odd"])
    return {"name": job.name, "ok": ok, "error": job.error, **facts, "cases": cases}


def _check_line(found: dict[str, Any]) -> str:
    cases = [case for case in found["cases"] if not case["odd"]]
    good = sum(case["ok"] for case in cases)
    odd = [case for case in found["cases"] if case["odd"]]
    portable = sum(not case["family_ran"] for case in found["cases"])
    verdict = "ok   " if found["ok"] else "WRONG"
    worst = max((case["share"] for case in cases), default=0.0)
    text = (
        f"{verdict} {found['name']}: {good} of {len(cases)} cases, worst {worst:.2f} of its bound"
    )
    if odd:
        text += f"; hidden NaN {sum(case['ok'] for case in odd)} of {len(odd)}"
    if portable:
        text += f"; {portable} served by the portable kernel"
    if found["error"]:
        text += f"\n      {found['error']}"
    wrong = [case for case in cases if not case["ok"]]
    return "\n      ".join([text, *(case["text"] for case in wrong[:4])])


def _timing_line(each: dict[str, Any]) -> str:
    shown = "  ".join(f"{name} {value}" for name, value in each["tflops"].items())
    return f"{each['variant']} N={each['length']}: {shown}"


def _write(out: Path, record: dict[str, Any]) -> None:
    (out / "gluon_first.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    lines = [_check_line(found) for found in record["checks"]]
    lines += ["", *map(_timing_line, record["timings"])]
    (out / "gluon_first.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---- in a worker ---------------------------------------------------------------------------------


def serve(channel: Connection) -> None:
    """Main function of a worker: one task, what it finds as messages, then the end."""
    task = channel.recv()
    try:
        {"check": _check, "time": _time}[task["what"]](channel, task)
    except Exception as error:  # whatever it is, it belongs to this variant
        channel.send(("error", traceback.format_exc()[-1500:] if str(error) else repr(error)))
    channel.send(("end", None))


def _say(channel: Connection, step: str, limit_s: float) -> None:
    channel.send(("step", {"step": step, "limit_s": limit_s}))


def _variant(name: str) -> Variant:
    return next(variant for variant in VARIANTS if variant.name == name)


def _check(channel: Connection, task: dict[str, Any]) -> None:
    """Compile, then each shape against fp64: outputs poisoned, unseen keys NaN."""
    import torch

    from flashgen.compiler.cases import Case
    from flashgen.compiler.choose import compile as compile_spec
    from flashgen.compiler.verification import run_case
    from flashgen.runtime.draw import NAN_EVERY

    variant = _variant(task["variant"])
    schedule = variant.schedules[task["schedule"]]
    device = torch.device(task["device"])
    attention = compile_spec(variant.spec, schedule=schedule, return_lse=True)
    ran = counted(attention)
    limit_s = COMPILE_S
    with torch.no_grad():
        for number, shape in enumerate(SHAPES):
            for odd in (False, True):
                index = NAN_EVERY * number + odd
                case = Case(schedule, shape, STRIDES[number % len(STRIDES)], index)
                _say(channel, f"checking {case}", limit_s)
                limit_s, before = STEP_S, len(ran)
                result = run_case(attention, case, device)
                found: dict[str, Any] = {"case": str(case), "odd": odd, "ok": result.ok}
                found["text"] = str(result)
                found |= {"share": min(result.share, 1e9), "family_ran": len(ran) > before}
                channel.send(("result", found))


def counted(attention: Attention) -> list[Seen]:
    """Grows with each launch of the schedule's own kernel: another one may serve in its place."""
    ran: list[Seen] = []
    launch = attention.launch

    def counting(*arguments: Any) -> Seen | None:
        seen = launch(*arguments)
        if seen is not None and seen.launches:
            ran.append(seen)
        return seen

    attention.launch = counting  # type: ignore[method-assign, assignment]
    return ran


def _time(channel: Connection, task: dict[str, Any]) -> None:
    """TFLOP/s of right schedules and of cuDNN, in bursts, taking turns."""
    import torch
    from torch.nn.attention import SDPBackend

    from flashgen.bench.peers import sdpa
    from flashgen.bench.work import count_work
    from flashgen.compiler.choose import compile as compile_spec
    from flashgen.spec.parts import Shape
    from flashgen.tune.clock import CudaClock
    from flashgen.tune.summary import summarise
    from flashgen.tune.tensors import draw
    from flashgen.tune.timing import Failure, alternate, describe, plan_burst

    variant = _variant(task["variant"])
    spec, clock, device = variant.spec, CudaClock(), task["device"]
    contestants: dict[str, Any] = {}
    if variant.plain:
        cudnn = sdpa(SDPBackend.CUDNN_ATTENTION, causal=bool(spec.mask))
        contestants["cudnn"] = cudnn
    for number in task["schedules"]:
        schedule = variant.schedules[number]
        contestants[str(schedule)] = _attend(compile_spec(spec, schedule=schedule))
    contestants["portable"] = _attend(compile_spec(spec))
    with torch.no_grad():
        for length in LENGTHS if variant.plain else VARIANT_LENGTHS:
            _say(channel, f"timing N={length}", COMPILE_S)
            heads = HIDDEN // spec.head_dim.v
            shape = Shape(TOKENS // length, heads, heads, length, length)
            arguments = draw(spec, shape, seed=length, device=device)
            bursts, tflops = {}, {}
            for name, attend in contestants.items():
                try:
                    attend(arguments)  # compiles: not a sample of how long a call takes
                    bursts[name] = plan_burst([partial(attend, arguments)], clock, graph=True)
                except Exception as error:  # one contestant's failure is a result
                    tflops[name] = describe(error)
            flops = count_work(spec, shape, arguments.inputs, device=device).matmul_flops
            for name, samples in alternate(bursts, clock, pause_s=0.2).items():
                if isinstance(samples, Failure):
                    tflops[name] = samples.reason
                    continue
                s = summarise(samples)
                rates = [round(flops / ms / 1e9) for ms in (s.median, s.p80, s.p20)]
                tflops[name] = f"{rates[0]} ({rates[1]}-{rates[2]})"
            found = {"variant": variant.name, "length": length}
            how = {name: burst.how for name, burst in bursts.items()}
            channel.send(("result", {**found, "tflops": tflops, "how": how}))


def _attend(attention: Any) -> Any:
    return lambda a: attention(a.q, a.k, a.v, **a.others)


if __name__ == "__main__":
    main()

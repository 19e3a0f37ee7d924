"""One case's trials, kept in an Optuna study that many processes may share.

A study belongs to a kernel, a GPU, a toolchain and a shape; in it every schedule has at most one
trial that counts. To measure a schedule, a process claims it: it adds a running trial, and the
claim holds if no earlier trial of the schedule is alive. Numbers of trials are given out one after
the other by every storage, so two processes never both hold a claim. Its owner lets the trial's
heart beat; a trial whose owner has ended, or whose heart stood still for a minute by the watch of
whoever looks, is void, and its schedule free again.

The measurement is written before the trial is told as finished, so that a process killed between
the two loses nothing: whoever comes next finishes the trial for it.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from flashgen import settings
from flashgen.errors import FlashgenError, TuningError
from flashgen.fingerprint import fingerprint
from flashgen.schedule.model import HOPPER, SCHEDULERS, Bucket, Schedule
from flashgen.spec.parts import Shape
from flashgen.tune.measurement import Measurement
from flashgen.tune.owner import Owner, me
from flashgen.tune.storage import Place, explained, open_storage, quiet_optuna
from flashgen.tune.toolchain import Device, Toolchain
from flashgen.tune.verdicts import HUNG

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

BEAT_S = 5.0
STALE_S = 60.0
RETRIES_S = (0.2, 1.0, 3.0)  # waits before the next attempt to write to a storage that failed
# What storages raise when a trial that is over is changed: Optuna has a name for it since 4.3, a
# RuntimeError too.
ALREADY_OVER = (RuntimeError,)
DISCARDED, RACE = "discarded ", "race "


@dataclass(frozen=True)
class Case:
    """What trials of one study have in common; anything else may change without losing them.

    kernel_digest: of the untuned kernel; hopper_digest: of the family gluon_sm90's ("": it has
    none for the case).
    """

    spec: str
    fingerprint: str
    gpu: str
    device: Device
    toolchain: Toolchain
    kernel_digest: str
    direction: str
    bucket: Bucket
    shape: Shape
    hopper_digest: str = ""

    @property
    def key(self) -> str:
        """12 hex digits of all that timings depend on beside the schedule."""
        return fingerprint(
            {
                "fingerprint": self.fingerprint,
                "gpu": [self.gpu, self.device.name, self.device.sm_count],
                "toolchain": self.toolchain.key,
                "kernel": self.kernel_digest
                if not self.hopper_digest
                else [self.kernel_digest, self.hopper_digest],
                "pass": self.direction,
                "bucket": self.bucket.to_dict(),
                "shape": asdict(self.shape),
            }
        )[:12]

    def digest_of(self, schedule: Schedule) -> str:
        """Of the kernel that a schedule of the case is one of."""
        return self.hopper_digest if schedule.family == HOPPER else self.kernel_digest

    @property
    def study(self) -> str:
        """The study's name: readable first, exact at the end."""
        s = self.shape
        sizes = f"b{s.batch}-h{s.q_heads}-{s.kv_heads}-q{s.q_len}-k{s.kv_len}"
        return f"{self.spec[:80]}.{self.gpu}.{self.direction}.{sizes}.{self.key}"

    def to_dict(self) -> dict[str, Any]:
        """For people who open the study with other tools."""
        return {
            "spec": self.spec,
            "fingerprint": self.fingerprint,
            "gpu": self.gpu,
            "pass": self.direction,
            "bucket": self.bucket.to_dict(),
            "shape": asdict(self.shape),
            "kernel_digest": self.kernel_digest,
            "hopper_digest": self.hopper_digest,
            **self.device.to_dict(),
            **self.toolchain.to_dict(),
        }


class Trials:
    """The trials of a case: what is known, and the right to measure what is not.

    May be used by several threads. Everything raises TuningError where the storage fails.
    """

    def __init__(self, case: Case, place: Place, *, retry_failed: bool = False) -> None:
        self.case, self.place = case, place
        self._lock = threading.RLock()
        self._hearts: dict[int, tuple[object, float]] = {}
        self._forgotten: frozenset[int] = frozenset()
        self._undiscarded: set[Schedule] = set()  # by this process alone, until discarded again
        self._schedules: dict[int, Schedule | None] = {}
        self._results: dict[int, Measurement | None] = {}  # of finished trials: they change no more
        self._storage = open_storage(place, case.study)
        with explained(place):
            self._study = self._open()
            self._study_id = self._storage.get_study_id_from_name(case.study)
            self._tell_untold()
            self.recover()
            if retry_failed:
                self._undiscarded = {schedule for schedule, _ in self._attributes(DISCARDED)}
                self._forgotten = frozenset(
                    trial._trial_id for trial, found in self._finished() if not found.measured
                )

    def _open(self) -> Study:
        import optuna

        with quiet_optuna():
            study = optuna.create_study(
                storage=self._storage, study_name=self.case.study, load_if_exists=True
            )
        if "case" not in study.user_attrs:
            study.set_user_attr("case", self.case.to_dict())
        return study

    @property
    def study(self) -> Study:
        """Optuna's view, for its own visualisations."""
        return self._study

    # **** what is known ****

    def known(self) -> dict[Schedule, Measurement]:
        """Every schedule that was measured or failed, in the order of its trial."""
        found: dict[Schedule, Measurement] = {}
        with explained(self.place):
            for _, measurement in self._finished():
                found.setdefault(measurement.schedule, measurement)
        return found

    def taken(self) -> set[Schedule]:
        """Schedules that other trials are measuring at this moment."""
        with explained(self.place):
            return {
                schedule
                for trial in self._trials()
                if not trial.state.is_finished()
                and (schedule := self._schedule_of(trial)) is not None
                and not self._is_abandoned(trial)
            }

    def discarded(self) -> dict[Schedule, str]:
        """Schedules that do not compile or fit, with the reason; they are no trials.

        One that was tried again and has a trial now is none of them. Whether one hung before is
        not asked here: it may have been forgotten since.
        """
        tried_again = self._undiscarded | self.known().keys()
        return {
            schedule: str(reason)
            for schedule, reason in self._attributes(DISCARDED)
            if reason != HUNG and schedule not in tried_again
        }

    def discard(self, reasons: Mapping[Schedule, str]) -> None:
        self._undiscarded -= reasons.keys()
        with explained(self.place):
            for schedule, reason in reasons.items():
                self._study.set_user_attr(DISCARDED + _text(schedule), reason)

    def races(self) -> dict[Schedule, Measurement]:
        """The latest time of each schedule in a race."""
        found: dict[Schedule, Measurement] = {}
        for schedule, value in self._attributes(RACE):
            with suppress(FlashgenError, KeyError, TypeError, ValueError):
                found[schedule] = Measurement.from_dict(value)
        return found

    def keep_race(self, results: Mapping[Schedule, Measurement]) -> None:
        with explained(self.place):
            for schedule, result in results.items():
                self._study.set_user_attr(RACE + _text(schedule), result.to_dict())

    def _attributes(self, prefix: str) -> Iterator[tuple[Schedule, Any]]:
        with explained(self.place):
            attributes = self._study.user_attrs
        for name, value in attributes.items():
            if name.startswith(prefix):
                with suppress(ValueError):  # a name that someone else gave
                    schedule = _parsed(json.loads(name[len(prefix) :]))
                    if schedule is not None:
                        yield schedule, value

    def _trials(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(self._study_id, deepcopy=False)

    def _finished(self) -> Iterator[tuple[FrozenTrial, Measurement]]:
        for trial in self._trials():
            if trial.state.is_finished() and trial._trial_id not in self._forgotten:
                found = self._result_of(trial)
                if found is not None:
                    yield trial, found

    def _schedule_of(self, trial: FrozenTrial) -> Schedule | None:
        """None for a trial of someone else, or of a flashgen that has other fields."""
        trial_id = trial._trial_id
        if trial_id not in self._schedules:
            value = trial.user_attrs.get("schedule")
            self._schedules[trial_id] = _parsed(value) if isinstance(value, dict) else None
        return self._schedules[trial_id]

    def _result_of(self, trial: FrozenTrial) -> Measurement | None:
        """Of a finished trial; None for one that was voided."""
        trial_id = trial._trial_id
        if trial_id not in self._results:
            self._results[trial_id] = _measurement_of(trial)
        return self._results[trial_id]

    # **** claims ****

    def claim(self, schedule: Schedule) -> Claim | None:
        """The right to measure a schedule; None: it is known, or someone else has the right."""
        with self._lock, explained(self.place):
            if self._holder(schedule) is not None:
                return None
            token = uuid.uuid4().hex
            trial_id = self._add(schedule, {"owner": str(me()), "token": token})
            holder = self._holder(schedule)
            if holder is not None and holder._trial_id != trial_id:
                self._void(trial_id, f"claimed by trial {holder.number} before")
                return None
        return Claim(self, trial_id, schedule)

    def _holder(self, schedule: Schedule) -> FrozenTrial | None:
        """The earliest trial of a schedule that is alive or has a result."""
        for trial in self._trials():
            if trial._trial_id in self._forgotten or self._schedule_of(trial) != schedule:
                continue
            if trial.state.is_finished():
                if self._result_of(trial) is not None:
                    return trial
            elif not self._is_abandoned(trial):
                return trial
        return None

    def _add(self, schedule: Schedule, attributes: Mapping[str, object]) -> int:
        """A running trial, with its parameters from the first moment on."""
        from optuna.trial import TrialState, create_trial

        trial = create_trial(
            state=TrialState.RUNNING,
            params=parameters(schedule),
            distributions=_distributions(parameters(schedule)),
            user_attrs={"schedule": schedule.to_dict(), **attributes},
        )
        return self._storage.create_new_trial(self._study_id, template_trial=trial)

    def recover(self) -> int:
        """Finish or void the trials of processes that are gone; how many."""
        count = 0
        with self._lock, explained(self.place):
            for trial in self._trials():
                if trial.state.is_finished() or not self._is_abandoned(trial):
                    continue
                found = _measurement_of(trial)
                if found is None:
                    self._void(trial._trial_id, "its process ended before it was measured")
                else:
                    self._finish(trial._trial_id, found)
                count += 1
        return count

    def _is_abandoned(self, trial: FrozenTrial) -> bool:
        owner = Owner.parse(str(trial.user_attrs.get("owner", "")))
        if owner is not None and owner.is_dead:
            return True
        heart = trial.user_attrs.get("beat")
        now = time.monotonic()
        last, since = self._hearts.get(trial._trial_id, (object(), now))
        if heart != last:
            since = now
        self._hearts[trial._trial_id] = (heart, since)
        return now - since > STALE_S

    def _void(self, trial_id: int, reason: str) -> None:
        from optuna.trial import TrialState

        with suppress(*ALREADY_OVER):
            self._storage.set_trial_user_attr(trial_id, "void", reason)
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)

    def _finish(self, trial_id: int, found: Measurement) -> bool:
        """Write the result, then tell that the trial is over; False: somebody voided it before."""
        from optuna.trial import TrialState

        state = TrialState.COMPLETE if found.measured else TrialState.FAIL
        try:
            self._storage.set_trial_user_attr(trial_id, "measurement", found.to_dict())
            values = [found.time_us] if found.time_us is not None else None
            self._storage.set_trial_state_values(trial_id, state, values)
        except ALREADY_OVER:
            if not self._storage.get_trial(trial_id).state.is_finished():
                raise
            return False
        return True

    def _beat(self, trial_id: int, count: int) -> None:
        with suppress(TuningError, *ALREADY_OVER), explained(self.place):
            self._storage.set_trial_user_attr(trial_id, "beat", count)

    # **** results that a storage did not take ****

    @property
    def _untold(self) -> Any:
        return settings.trials_dir() / "untold" / f"{self.case.study}.jsonl"

    def _keep_untold(self, found: Measurement) -> str:
        """Write a result beside, for the next run; where that is said."""
        try:
            self._untold.parent.mkdir(parents=True, exist_ok=True)
            with self._untold.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(found.to_dict()) + "\n")
        except OSError as error:
            return f"the last result is lost ({error.strerror})"
        return f"the last result is in {self._untold}, which the next run takes up"

    def _tell_untold(self) -> None:
        try:
            lines = self._untold.read_text("utf-8").splitlines()
        except OSError:
            return
        for line in lines:
            with suppress(FlashgenError, KeyError, TypeError, ValueError):
                found = Measurement.from_dict(json.loads(line))
                if self._holder(found.schedule) is None:
                    self._finish(self._add(found.schedule, {"owner": str(me())}), found)
        with suppress(OSError):
            self._untold.unlink()


@dataclass
class Claim:
    """A schedule that this process alone measures. Leave it by `finish` or `release`."""

    trials: Trials
    trial_id: int
    schedule: Schedule
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def alive(self) -> Iterator[Claim]:
        """While inside, others see that somebody works on it; what is raised gives it back."""
        heart = threading.Thread(target=self._beat, name="flashgen-trial", daemon=True)
        heart.start()
        try:
            yield self
        except BaseException:
            with suppress(TuningError):
                self.release("interrupted")
            raise
        finally:
            self._stop.set()
            heart.join()

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(BEAT_S):
            count += 1
            self.trials._beat(self.trial_id, count)

    def finish(self, found: Measurement) -> bool:
        """Keep the result. False: the claim was taken for dead and voided; the result is dropped.

        A storage that fails is tried again for some seconds; then the result is kept in the cache
        for the next run, and TuningError says so.
        """
        for wait in (*RETRIES_S, None):
            try:
                with explained(self.trials.place):
                    return self.trials._finish(self.trial_id, found)
            except TuningError as error:
                if wait is None:
                    raise TuningError(f"{error}\n  {self.trials._keep_untold(found)}.") from error
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def release(self, reason: str) -> None:
        """Give the schedule back unmeasured."""
        with explained(self.trials.place):
            self.trials._void(self.trial_id, reason)


# **** schedules as trials ****


def parameters(schedule: Schedule) -> dict[str, int]:
    """What Optuna's pictures show of a schedule; those of a family's own fields are there where it
    is of that family. Whole numbers only: a list of words could not be extended within a study."""
    found = {
        "block_m": schedule.block_m,
        "block_n": schedule.block_n,
        "num_warps": schedule.num_warps,
        "num_stages": schedule.num_stages,
        "maxnreg": schedule.maxnreg or 0,
        "num_kv_splits": schedule.num_kv_splits or 0,
        "flash1": int(schedule.loop_order == "flash1"),
        "single_tile": int(schedule.kernel == "single_tile"),
        "hopper": int(schedule.family == HOPPER),
    }
    own = schedule.sm90
    if own is None:
        return found
    return found | {
        "consumers": schedule.consumers,
        "scheduler": SCHEDULERS.index(own.scheduler),
        "q_buffers": own.q_buffers,
        "separate_out": int(own.separate_out),
        "group_mb": own.group_mb,
        "direct_out": int(own.direct_out),
        "overlapped": int(own.overlapped),
        "programs_per_sm": own.programs_per_sm,
        "packed_heads": own.packed_heads,
    }


def _distributions(names: Iterable[str]) -> dict[str, Any]:
    from optuna.distributions import IntDistribution

    known = {
        "block_m": IntDistribution(1, 4096, log=True),
        "block_n": IntDistribution(1, 4096, log=True),
        "num_warps": IntDistribution(1, 64, log=True),
        "num_stages": IntDistribution(1, 16),
        "maxnreg": IntDistribution(0, 1024),
        "num_kv_splits": IntDistribution(0, 1024),
        "flash1": IntDistribution(0, 1),
        "single_tile": IntDistribution(0, 1),
        "hopper": IntDistribution(0, 1),
        "consumers": IntDistribution(1, 16),
        "scheduler": IntDistribution(0, 15),
        "q_buffers": IntDistribution(1, 16),
        "separate_out": IntDistribution(0, 1),
        "group_mb": IntDistribution(1, 1 << 20, log=True),
        "direct_out": IntDistribution(0, 1),
        "overlapped": IntDistribution(0, 1),
        "programs_per_sm": IntDistribution(1, 32),
        "packed_heads": IntDistribution(1, 64, log=True),
    }
    return {name: known[name] for name in names}


def _text(schedule: Schedule) -> str:
    return json.dumps(schedule.to_dict(), separators=(",", ":"))


def _parsed(value: Mapping[str, object]) -> Schedule | None:
    with suppress(FlashgenError, TypeError, AttributeError):
        return Schedule.from_dict(value)
    return None


def _measurement_of(trial: FrozenTrial) -> Measurement | None:
    value = trial.user_attrs.get("measurement")
    if value is None:
        return None
    with suppress(FlashgenError, KeyError, TypeError, ValueError):
        return Measurement.from_dict(value)
    return None


def measured_only(found: Iterable[Measurement]) -> list[Measurement]:
    """Those with a time, the fastest first."""
    timed = [each for each in found if each.time_us is not None]
    return sorted(timed, key=lambda each: (each.time_us or 0.0, each.schedule))

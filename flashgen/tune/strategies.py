"""Which schedule to try next: at random, by Optuna's TPE, or by the model corrected as it goes.

A strategy orders the schedules that are still free, best bet first; it never proposes one that is
not feasible or already known. `comparison.py` holds them against exhaustive data.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from flashgen.schedule.model import Schedule
from flashgen.tune.measurement import Measurement
from flashgen.tune.storage import need_optuna, quiet_optuna
from flashgen.tune.study import parameters

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Known = Mapping[Schedule, Measurement]
SAMPLERS = ("model", "tpe", "random")
FAILED_FACTOR = 2.0  # what has no time counts as this many times the slowest
# Times `ModelOrder.tilt`: a model may well be wrong by a factor of 3 for all of a family.
FAMILY_TILT = 8.0
TPE_ASKED = 24  # proposals of TPE for one order; the rest follows at random. One costs 15 ms


class Strategy(Protocol):
    """Orders free schedules by what is known."""

    def order(self, known: Known, free: Sequence[Schedule]) -> list[Schedule]:
        """`free`, the one to try next first."""
        ...


@dataclass(frozen=True)
class RandomOrder:
    """The yardstick: an order fixed by the seed."""

    seed: int = 0

    def order(self, known: Known, free: Sequence[Schedule]) -> list[Schedule]:
        ranks = random.Random(self.seed)
        return sorted(sorted(free), key=lambda schedule: ranks.random())


@dataclass(frozen=True)
class TpeOrder:
    """Optuna's TPE on a copy of what is known; a proposal stands for the nearest free schedule."""

    seed: int = 0
    first: int = 6  # at random before TPE has something to go by
    asked: int = TPE_ASKED

    def order(self, known: Known, free: Sequence[Schedule]) -> list[Schedule]:
        import optuna

        need_optuna()
        shuffled = RandomOrder(self.seed).order(known, free)
        times = _times(known)
        if len(times) < self.first:
            return shuffled
        axes = _Axes.of([*known, *free])
        with quiet_optuna():
            study = optuna.create_study(sampler=self._sampler(len(known)))
        distributions = axes.distributions()
        for schedule, time_us in times.items():
            study.add_trial(
                optuna.trial.create_trial(
                    params=(place := axes.place(schedule)),
                    distributions={name: distributions[name] for name in place},
                    value=time_us,
                )
            )
        chosen: dict[Schedule, None] = {}
        for _ in range(min(self.asked, len(shuffled))):
            asked = study.ask(distributions)
            left = [schedule for schedule in shuffled if schedule not in chosen]
            if not left:
                break
            nearest = min(left, key=lambda s: axes.distance(asked.params, s))
            chosen[nearest] = None
        return [*chosen, *(schedule for schedule in shuffled if schedule not in chosen)]

    def _sampler(self, count: int) -> object:
        import warnings

        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(
                multivariate=True,
                group=True,  # a family's own fields are there in its trials only
                n_startup_trials=0,
                seed=self.seed + count,
            )


@dataclass(frozen=True)
class ModelOrder:
    """By predicted time, corrected by what was measured so far.

    The correction is a Bayesian linear regression of log(measured / predicted) on the schedule's
    numbers and their products, those of each family for itself, and on the family; with nothing
    measured it is the plain prediction. Ordered by the
    lower end of what is likely (mean minus `daring` standard deviations), a schedule is tried where
    the model is good or where nothing like it was measured yet. Of each number of warps, and with a
    cap on registers or without, one is tried before all others: a model that is wrong about these
    is so by a factor, for half of the space.
    """

    predicted_us: Mapping[Schedule, float] = field(hash=False)
    daring: float = 1.0
    tilt: float = 0.15  # log of the factor by which a step on an axis is usually mispredicted
    noise: float = 0.08  # what no such step explains

    def order(self, known: Known, free: Sequence[Schedule]) -> list[Schedule]:
        estimate = self._estimates(_times(known), free)
        ranked = sorted(free, key=lambda schedule: (estimate[schedule], schedule))
        fresh = next((s for s in ranked if known and _is_of_a_kind_not_seen(s, known)), None)
        return ranked if fresh is None else [fresh, *(s for s in ranked if s != fresh)]

    def _estimates(
        self, times: Mapping[Schedule, float], free: Sequence[Schedule]
    ) -> dict[Schedule, float]:
        """Log of the time at the lower end of what is likely."""
        usable = [s for s in times if s in self.predicted_us]
        plain = {s: math.log(self.predicted_us.get(s, math.inf)) for s in free}
        if not usable:
            return plain
        features = _standardised([*usable, *free])
        rows, ahead = features[: len(usable)], features[len(usable) :]
        ratio = np.array([math.log(times[s] / self.predicted_us[s]) for s in usable])
        ratio = ratio - np.median(ratio)
        precision = rows.T @ rows / self.noise**2 + np.eye(rows.shape[1]) / self.tilt**2
        covariance = np.linalg.inv(precision)
        weights = covariance @ rows.T @ ratio / self.noise**2
        deviation = np.sqrt(np.einsum("ij,jk,ik->i", ahead, covariance, ahead))
        correction = ahead @ weights - self.daring * deviation
        return {s: plain[s] + float(c) for s, c in zip(free, correction, strict=True)}


def _is_of_a_kind_not_seen(schedule: Schedule, known: Known) -> bool:
    return all(_kind(schedule) != _kind(other) for other in known)


def _kind(schedule: Schedule) -> tuple[int, bool]:
    return schedule.num_warps, schedule.maxnreg is None


def strategy(
    name: str,
    predict: Callable[[], Mapping[Schedule, float]],
    seed: int = 0,
    used: int = TPE_ASKED,
) -> Strategy:
    """A strategy by its name in `SAMPLERS`; predict: predicted times, asked for where needed;
    used: how many of an order are made use of, the rest may be in any order."""
    if name == "model":
        return ModelOrder(predict())
    return TpeOrder(seed, asked=used) if name == "tpe" else RandomOrder(seed)


def _times(known: Known) -> dict[Schedule, float]:
    """Microseconds of what was tried; what failed counts as slow."""
    timed = [each.time_us for each in known.values() if each.time_us is not None]
    slow = FAILED_FACTOR * max(timed, default=0.0)
    return {
        schedule: slow if found.time_us is None else found.time_us
        for schedule, found in known.items()
        if found.time_us is not None or timed
    }


def _standardised(schedules: Sequence[Schedule]) -> NDArray[np.float64]:
    """A row of numbers for each schedule, with the mean 0 and the deviation 1 within its family;
    numbers of other families are 0. Where there are two families, the last ones say which."""
    families = [schedule.family for schedule in schedules]
    parts = []
    for family in sorted(set(families)):
        inside = np.array([each == family for each in families])
        own = np.array([_features(s) for s in schedules if s.family == family])
        spread = own.std(axis=0)
        part = np.zeros((len(schedules), own.shape[1]))
        part[inside] = (own - own.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
        parts.append(part)
    if len(parts) > 1:
        known = sorted(set(families))
        parts.append(
            FAMILY_TILT * np.array([[float(f == each) for each in known] for f in families])
        )
    return np.hstack(parts)


def _features(schedule: Schedule) -> list[float]:
    m, n = math.log2(schedule.block_m), math.log2(schedule.block_n)
    w, s = math.log2(schedule.num_warps), float(schedule.num_stages)
    own = schedule.sm90
    if own is not None:
        static, dynamic = (float(own.scheduler == each) for each in ("static", "dynamic"))
        m += math.log2(own.programs_per_sm)  # rows of an SM
        piped, apart = float(own.q_buffers > 1), float(own.separate_out or own.direct_out)
        group, packed = math.log2(own.group_mb), math.log2(own.packed_heads)
        own_kinds = [static, dynamic, piped, apart, group, packed]
        return [m, n, s, *own_kinds, m * n, n * s, static * group]
    base = [m, n, w, s, float(schedule.maxnreg is not None)]
    kinds = [float(schedule.loop_order == "flash1"), float(schedule.kernel == "single_tile")]
    return [*base, *kinds, m * m, n * n, m * n, m * w, n * w, s * s, n * s]


@dataclass(frozen=True)
class _Axes:
    """The values that each number of a schedule takes in a space, as steps on an axis.

    A schedule has a place on the axes of its own family alone.
    """

    values: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, schedules: Sequence[Schedule]) -> _Axes:
        found: dict[str, set[int]] = {}
        for schedule in schedules:
            for name, value in parameters(schedule).items():
                found.setdefault(name, set()).add(value)
        return cls({name: tuple(sorted(v)) for name, v in found.items() if len(v) > 1})

    def distributions(self) -> dict[str, BaseDistribution]:
        from optuna.distributions import IntDistribution

        return {name: IntDistribution(0, len(v) - 1) for name, v in self.values.items()}

    def place(self, schedule: Schedule) -> dict[str, int]:
        numbers = parameters(schedule)
        return {
            name: values.index(numbers[name])
            for name, values in self.values.items()
            if name in numbers
        }

    def distance(self, place: Mapping[str, int], schedule: Schedule) -> int:
        """Steps to a schedule; another family is farther than any of the proposed one."""
        there = self.place(schedule)
        far = sum(len(values) for values in self.values.values())
        steps = sum(abs(place[name] - there[name]) for name in there)
        return steps + far * (place.get("hopper") != there.get("hopper"))

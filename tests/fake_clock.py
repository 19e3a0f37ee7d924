"""Stand-ins for a device: a clock whose times are made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashgen.tune.timing import Call


class FakeClock:
    """Runs calls for real and reports `ms_of` of them; keeps a diary of what was asked."""

    def __init__(
        self, ms_of: Mapping[object, float] | None = None, *, default: float = 1.0
    ) -> None:
        self.ms_of = dict(ms_of or {})
        self.default = default
        self.capturable = True
        self.diary: list[tuple[object, int]] = []
        self.pauses: list[float] = []

    def times_ms(self, call: Call, count: int) -> list[float]:
        for _ in range(count):
            call()
        self.diary.append((call, count))
        return [self.ms_of.get(call, self.default)] * count

    def capture(self, calls: Sequence[Call]) -> Call | None:
        if not self.capturable:
            return None

        def replay() -> None:
            for call in calls:
                call()

        self.ms_of[replay] = sum(self.ms_of.get(call, self.default) for call in calls)
        return replay

    def idle(self, seconds: float) -> None:
        self.pauses.append(seconds)

"""Every error a user can meet: facts go in, the sentence is built here, and so is the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class FlashgenWarning(UserWarning):
    """Something flashgen did differently from what was asked or usual; said once, not silently."""


class FlashgenError(Exception):
    """Base of all errors that a user can cause or mend. `exit_code` is what the CLI returns."""

    exit_code: ClassVar[int] = 1

    def __reduce__(self) -> tuple[object, ...]:
        # Subclasses take facts and store a sentence; a pickle keeps both, without building it anew.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[FlashgenError], args: tuple[object, ...], facts: dict[str, object]
) -> FlashgenError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


@dataclass(frozen=True)
class SpecProblem:
    """One fault in a spec: where it is, what was got, what is allowed (`line`, `column` from 1)."""

    source: str
    line: int
    column: int
    field: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        place = f"{self.source}:{self.line}:{self.column}" if self.line else self.source
        text = (
            f"{place}: {self.field}: {self.message}" if self.field else f"{place}: {self.message}"
        )
        return f"{text}\n  hint: {self.hint}" if self.hint else text


class SpecError(FlashgenError, ValueError):
    """A spec that is not valid; `problems` holds all of its faults, in order of their place.

    Faults without a place (a spec built in Python) keep the order of the fields.
    """

    exit_code = 3

    def __init__(self, problems: Sequence[SpecProblem]) -> None:
        self.problems = tuple(
            sorted(problems, key=lambda problem: (problem.source, problem.line, problem.column))
        )
        super().__init__("\n".join(str(problem) for problem in self.problems))


class NotServedError(FlashgenError):
    """A valid spec with features that no kernel family serves yet."""

    exit_code = 4

    def __init__(self, name: str, features: Sequence[str]) -> None:
        self.features = tuple(features)
        listed = ", ".join(self.features)
        super().__init__(
            f"{name}: no kernel family serves {listed} yet\n"
            "  hint: the spec is valid; remove what is named, or wait for a release that serves it."
        )


class ScheduleError(FlashgenError):
    """No schedule is feasible, or a given one is not; `rejections` says why, tile by tile."""

    exit_code = 5

    def __init__(self, message: str, rejections: Sequence[object] = ()) -> None:
        self.rejections = tuple(rejections)
        super().__init__(message)


class VerificationError(FlashgenError):
    """A kernel differs from the fp64 oracle by more than the bound."""

    exit_code = 6


class CompileError(FlashgenError):
    """The back end refused the generated source; the message shows where that source is."""

    exit_code = 7


class TargetError(FlashgenError, ValueError):
    """An unknown GPU, or one that Triton here cannot compile for."""

    exit_code = 8


class TensorError(FlashgenError, ValueError):
    """An argument of a call that does not fit the spec."""

    exit_code = 9

    def __init__(self, argument: str, got: str, expected: str, hint: str | None = None) -> None:
        self.argument, self.got, self.expected = argument, got, expected
        text = f"{argument}: got {got}, expected {expected}"
        super().__init__(f"{text}\n  hint: {hint}" if hint else text)


class TuningError(FlashgenError):
    """A search that cannot begin or go on: nothing to choose from, or trials that cannot be kept.

    What was found until then is in the message, and kept where it can be.
    """

    exit_code = 10


class TableError(FlashgenError, ValueError):
    """A file of tuned configs that is not one: place, field, what was got, what is allowed."""

    def __init__(self, place: str, problem: str, hint: str | None = None) -> None:
        self.place, self.problem = place, problem
        text = f"{place}: {problem}"
        super().__init__(f"{text}\n  hint: {hint}" if hint else text)


class FrozenError(FlashgenError):
    """Work that takes seconds was needed after `flashgen.freeze()`, or during a capture."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"frozen: this call would have to {what}\n"
            "  hint: make one call of each kind (spec, GPU, shape bucket) before "
            "flashgen.freeze(), or unset FLASHGEN_FROZEN."
        )


class CaptureError(FrozenError):
    """Work that takes seconds was needed while a CUDA graph was being captured."""

    def __init__(self, what: str) -> None:
        FlashgenError.__init__(
            self,
            f"a CUDA graph is being captured, and this call would have to {what}\n"
            "  hint: make one call with these lengths before the capture, on the same device.",
        )


def install_hint(extra: str) -> str:
    """How to install an extra: flashgen is in no package index, so it is from a checkout."""
    return f"pip install -c constraints.txt '.[{extra}]', in a checkout of flashgen"

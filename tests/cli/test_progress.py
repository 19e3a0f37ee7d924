"""Progress: on standard error only, and only where something takes its time."""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import sys
import time

import pytest

from flashgen.cli import output
from flashgen.cli.interrupt import interruptible


class Terminal(io.StringIO):
    """Something to write to that calls itself a terminal."""

    def isatty(self) -> bool:
        return True


def test_nothing_for_what_is_over_soon(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress() as say:
        say("planning")
        say("compiling")
    time.sleep(output.QUIET_SECONDS / 10)
    assert capsys.readouterr() == ("", "")


def test_the_current_step_after_a_while_then_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "QUIET_SECONDS", 0.05)
    with output.progress() as say:
        say("planning")
        say("compiling")
        for _ in range(100):
            time.sleep(0.02)
            told = capsys.readouterr()
            if told.err:
                break
        assert told == ("", "compiling ...\n")
        say("writing")
    assert capsys.readouterr() == ("", "writing ...\n")


def test_one_changing_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with output.progress() as say:
        say("compiling kernel [1 of 2]")
        time.sleep(0.3)
    assert "compiling kernel [1 of 2]" in terminal.getvalue()


def test_table_columns_line_up(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table([("name", "bits"), ("float", "32")])
    assert capsys.readouterr().out == "name   bits\nfloat  32\n"


def test_a_swallowed_interrupt_comes_up_at_the_next_step() -> None:
    def work() -> None:
        with interruptible(), output.progress() as say:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            say("compiling")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with interruptible(), output.progress() as say:  # and is forgotten then
        say("compiling")


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_tests_hear_ctrl_c_also_where_they_are_started_with_it_ignored() -> None:
    """As with `pytest &` in a script, or nohup."""
    name = f"{__file__}::test_a_swallowed_interrupt_comes_up_at_the_next_step"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout

"""The settings of the interpreter while someone waits, and that they are put back."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from flashgen.haste import ALLOCATIONS, TURN_S, in_haste


def _settings() -> tuple[tuple[int, int, int], float]:
    return gc.get_threshold(), sys.getswitchinterval()


def test_settings_hold_inside_and_are_put_back() -> None:
    before = _settings()
    with pytest.raises(KeyError), in_haste():
        assert gc.get_threshold()[0] == ALLOCATIONS
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
        raise KeyError
    assert _settings() == before


def test_threads_that_overlap_put_back_what_was_there_before_all_of_them() -> None:
    before = _settings()
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with in_haste():
            first_in.set()
            assert second_in.wait(20)
        first_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_in.wait(20)
    with in_haste():
        second_in.set()
        assert first_out.wait(20)
        assert gc.get_threshold()[0] == ALLOCATIONS  # one is still inside
    thread.join()
    assert _settings() == before

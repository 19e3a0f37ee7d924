"""The clock of a CUDA device: events around calls, and graphs that replay them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from flashgen.tune.timing import Call


class CudaClock:
    """Times calls on the current CUDA device by events."""

    def times_ms(self, call: Call, count: int) -> list[float]:
        """Device times of `count` consecutive calls, in ms.

        Events stand between the calls, so a sample of a call that the host cannot issue as fast as
        the device runs it includes the waiting.
        """
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairwise(marks)]

    def capture(self, calls: Sequence[Call]) -> Call | None:
        """A CUDA graph of `calls`; None where one of them cannot be captured."""
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # what a call does once only, it does before the capture
                for call in calls[:2]:
                    call()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
            graph.replay()
            torch.cuda.synchronize()
        except Exception:  # whatever the reason: such calls are timed one by one
            torch.cuda.synchronize()
            return None
        replay: Call = graph.replay
        return replay

    def idle(self, seconds: float) -> None:
        torch.cuda.synchronize()
        time.sleep(seconds)

"""Times small pieces of work: the median of many calls on a CPU, CUDA graph replays on a GPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

now: Callable[[], float] = time.perf_counter
"""The timer for work on a CPU."""
QUANTILE = 0.5
"""The quantile of the measured times that is reported."""
FLUSH_BYTES = 16 << 20
"""Assumed bytes that the dense part brings into the CPU caches between two uses of the rows: more than all caches but the last hold."""


def quantile(seconds: list[float]) -> float:
    """The reported quantile of measured times."""
    return sorted(seconds)[int(QUANTILE * (len(seconds) - 1) + 0.5)]


@dataclass
class Clock:
    """Times work on one device."""

    device: torch.device
    budget_s: float = 0.03
    """How long each piece of work is repeated, after at least `least_calls` calls."""
    least_calls: int = 5
    most_calls: int = 200
    flush_bytes: int = 0
    """Bytes written before each call to flush the CPU caches, as the rest of a step would."""
    stream: Any = None
    """The stream on which CUDA graphs are captured."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def seconds(self, call: Call) -> float:
        """Return the seconds of one call, on a GPU without launch time."""
        return self._time_graph(call) if self.is_cuda else self._time_calls([call])[0]

    def forward_and_back(
        self, forward: Callable[[], torch.Tensor], back: Callable[[torch.Tensor], Any], *, forward_s: float | None = None
    ) -> tuple[float, float]:
        """Return the seconds of the forward and the backward pass; on a GPU a known `forward_s` is not measured again."""
        if self.is_cuda:
            forward_only_s = forward_s or self._time_graph(forward)
            both_s = self._time_graph(lambda: back(forward()))
            return forward_only_s, max(both_s - forward_only_s, 1e-7)
        out: list[torch.Tensor] = []

        def begin() -> None:
            out[:] = [forward()]

        first, second = self._time_calls([begin, lambda: back(out[0])])
        return first, second

    def _time_calls(self, calls: list[Call]) -> list[float]:
        """Return the seconds of each call; the calls alternate."""
        for _ in range(2):
            for call in calls:
                call()
        seconds: list[list[float]] = [[] for _ in calls]
        flushed = torch.zeros(self.flush_bytes // 4)
        end = time.perf_counter() + self.budget_s
        while len(seconds[0]) < self.least_calls or (time.perf_counter() < end and len(seconds[0]) < self.most_calls):
            for index, call in enumerate(calls):
                flushed.add_(1.0)
                start = now()
                call()
                seconds[index].append(now() - start)
        return [quantile(each) for each in seconds]

    def _time_graph(self, call: Call, *, calls_per_graph: int = 8) -> float:
        """Return the seconds per call in a CUDA graph, the median of several replays."""
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        stream = self.stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            held = [call() for _ in range(calls_per_graph)]
        seconds = []
        for turn in range(3 + 7):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize(self.device)
            if turn >= 3:
                seconds.append(begin.elapsed_time(end) * 1e-3 / calls_per_graph)
        del held, graph
        return quantile(seconds)

    def free_memory(self) -> None:
        """Release unused memory."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

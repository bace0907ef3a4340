"""A training step as one CUDA graph: captured once, then replayed with one launch.

At small sizes a step is thousands of kernels that take microseconds each, and launching
them one by one takes most of the time. What a captured step may not do: wait for the
device, branch on a value, or allocate by one. Hence the engine's log index and the
learning rates live on the device, and the optimizer is ``capturable``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 3
"""Calls before the capture, real steps of the run: they allocate the optimizer's state and
let libraries choose their kernels, neither of which can happen while capturing."""


class GraphedCall:
    """Calls ``function(x)`` eagerly at first, then as a graph; eagerly for good if that fails.

    Args:
        function: changes tensors in place and returns nothing; ``x`` keeps its shape.
    """

    def __init__(self, function: Callable[[Tensor], None]) -> None:
        self._function = function
        self.reset()

    def reset(self) -> None:
        """Forget the graph and its memory: what it works on has changed shape."""
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._x: Tensor | None = None
        self.problem: str | None = None
        """Why it runs eagerly; None if it is captured or will be."""

    def __call__(self, x: Tensor) -> None:
        if self._graph is None and self._calls >= WARM_UP and self.problem is None:
            self._capture(x)
        self._calls += 1
        if self._graph is not None and self._x is not None:
            self._x.copy_(x, non_blocking=True)
            self._graph.replay()
        elif x.is_cuda:
            self._on_a_side_stream(x)
        else:
            self._function(x)

    def _capture(self, x: Tensor) -> None:
        """Record the call; nothing is computed yet."""
        static = x.clone()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._function(static)
        except Exception as error:  # out of memory, an operation that waits, no CUDA at all
            self.problem = f"no CUDA graph: {type(error).__name__}: {error}".splitlines()[0]
            return
        self._graph, self._x = graph, static

    def _on_a_side_stream(self, x: Tensor) -> None:
        """Warm-up must not touch the default stream's allocations."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._function(x)
        torch.cuda.current_stream().wait_stream(stream)

"""Regional compilation: blocks that do the same share one compiled function.

Parameters are arguments, so compile time grows with the number of distinct blocks (one to
three for the rules of the paper), not with depth.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from keelbench.archs import ResidualRule, Site
from keelbench.native.trace import Operation, trace
from keelbench.specs import ModelSpec

Block = Callable[[Sequence[Site], dict[str, Tensor], int, Any], Any]


class CompiledBlocks:
    """Stands in for a model's block function.

    Args:
        block: (sites, weights, seq, state) to state.
        spec: resolved.
        rule: must be traceable (``native.trace``): that is how equal blocks are known.
        backend: of ``torch.compile``; graphs must be whole, a break is an error.

    Raises:
        UntraceableError: if it cannot be told which blocks are equal.
    """

    def __init__(
        self, block: Block, spec: ModelSpec, rule: ResidualRule, backend: str = "inductor"
    ) -> None:
        self._block = block
        self._depth = spec.depth
        self.models = first_equal_block(spec, rule)
        self._compiled: dict[int, Callable[..., Any]] = {}
        self._backend = backend

    def __call__(
        self, sites: Sequence[Site], weights: dict[str, Tensor], seq: int, state: Any
    ) -> Any:
        block = sites[0].block
        model = self.models[block]
        mine = {
            name: weights[_moved(name, model, block)]
            for name in weights
            if _block_of(name) == model
        }
        if model not in self._compiled:
            self._compiled[model] = self._compile(model, tuple(mine))
        return self._compiled[model](state, seq, *mine.values())

    def _compile(self, model: int, names: tuple[str, ...]) -> Callable[..., Any]:
        sites = [Site(index, self._depth) for index in (2 * model, 2 * model + 1)]

        def run(state: Any, seq: int, *tensors: Tensor) -> Any:
            return self._block(sites, dict(zip(names, tensors, strict=True)), seq, state)

        return torch.compile(run, fullgraph=True, dynamic=False, backend=self._backend)


def first_equal_block(spec: ModelSpec, rule: ResidualRule) -> list[int]:
    """For each block, the first one that does the same."""
    signatures: dict[int, list[Operation]] = {block: [] for block in range(spec.blocks)}
    current: int | None = None
    for operation in trace(spec, rule, is_training=True):
        owners = {_block_of(name) for name in operation.weights if name}
        # A sum belongs to the block of the operation before it.
        current = owners.pop() if owners else current
        if current is not None:
            signatures[current].append(_relative(operation, current))
    firsts: dict[tuple[Operation, ...], int] = {}
    return [firsts.setdefault(tuple(signatures[block]), block) for block in range(spec.blocks)]


def _relative(operation: Operation, block: int) -> Operation:
    """The operation with values and names counted from its block's start."""
    names = tuple(_moved(name, block, 0) if name else "" for name in operation.weights)
    distance = [operation.out - x if x >= 0 else -1 for x in (operation.a, operation.b)]
    return replace(operation, out=0, a=distance[0], b=distance[1], weights=names)


def _block_of(name: str) -> int | None:
    head = name.partition(".")[0]
    return int(head) // 2 if head.isdigit() else None


def _moved(name: str, start: int, target: int) -> str:
    """The name of the same tensor in another block."""
    head, _, rest = name.partition(".")
    return f"{int(head) + 2 * (target - start)}.{rest}"

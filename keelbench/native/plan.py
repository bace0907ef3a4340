"""Where every value and gradient of a program lies in one arena, decided before it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keelbench.native.trace import Operation

KINDS = ("skip", "embed", "norm", "add", "attention", "ffn", "head")
OPERATION = np.dtype(
    [
        *[(name, "i8") for name in ("kind", "a", "b", "out")],
        ("weight", "i8", 5),
        ("kept", "i8", 3),
        *[(name, "i8") for name in ("dout", "da", "db", "a_sum", "b_sum", "w_sum")],
        ("alpha", "f8"),
        ("beta", "f8"),
    ]
)
"""The struct ``Op`` of the C source."""

ALIGN = 16
"""Numbers to a cache line."""


@dataclass(frozen=True)
class Plan:
    """Operations with their offsets, and how many numbers the arena holds."""

    forward: NDArray[np.void]
    backward: NDArray[np.void]
    """As ``forward``; operations that no gradient reaches are skipped."""
    size: int


class _Arena:
    """Hands out slots for values, all of one size, and blocks of any size for good."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.size = 0
        self._free: list[int] = []

    def block(self, size: int) -> int:
        start = self.size
        self.size += -(-size // ALIGN) * ALIGN
        return start

    def take(self) -> int:
        return self._free.pop() if self._free else self.block(self.slot)

    def give(self, offset: int) -> None:
        self._free.append(offset)


def make_plan(
    operations: Sequence[Operation],
    offsets: Mapping[str, int],
    slot: int,
    kept: Mapping[str, Sequence[int]],
    *,
    is_training: bool,
) -> Plan:
    """Lay out a program.

    Args:
        operations: as traced; value i is the result of operation i.
        offsets: where each weight starts in a lane.
        slot: numbers in one value.
        kept: per kind of operation, the sizes of what it keeps for its backward pass.
        is_training: keep what the backward pass needs; otherwise reuse it at once.
    """
    arena = _Arena(slot)
    shared = {
        kind: [arena.block(n) for n in sizes] for kind, sizes in kept.items() if not is_training
    }
    table = np.zeros(len(operations), OPERATION)
    last = {value: i for i, op in enumerate(operations) for value in op.inputs}
    saved = {
        value for op in operations if is_training and op.kind != "add" for value in op.inputs
    }
    place: dict[int, int] = {}
    for i, op in enumerate(operations):
        place[i] = arena.take()
        blocks = shared.get(op.kind) or [arena.block(n) for n in kept.get(op.kind, ())]
        _fill(table[i], op, place, offsets, blocks)
        for value in {*op.inputs, i}:
            if last.get(value, i) == i and value not in saved:
                arena.give(place[value])
    backward = _plan_backward(operations, table.copy(), arena) if is_training else table
    return Plan(table, backward, arena.size)


def _fill(
    row: np.void,
    op: Operation,
    place: Mapping[int, int],
    offsets: Mapping[str, int],
    blocks: Sequence[int],
) -> None:
    row["kind"] = KINDS.index(op.kind)
    row["out"] = place[op.out]
    row["a"], row["b"] = place.get(op.a, -1), place.get(op.b, -1)
    row["alpha"], row["beta"] = op.alpha, op.beta
    row["weight"] = -1
    row["weight"][: len(op.weights)] = [offsets[name] if name else -1 for name in op.weights]
    row["kept"][: len(blocks)] = blocks


def _plan_backward(
    operations: Sequence[Operation], table: NDArray[np.void], arena: _Arena
) -> NDArray[np.void]:
    """Give each gradient a slot; the first contribution writes it, later ones add."""
    grads: dict[int, int] = {}
    written: set[tuple[str, ...]] = set()
    for op, row in zip(reversed(operations), reversed(table), strict=True):
        dout = grads.pop(op.out, None)
        if dout is None and op.kind != "head":
            row["kind"] = KINDS.index("skip")
            continue
        is_passed_on = False
        for name, value, factor in (("a", op.a, op.alpha), ("b", op.b, op.beta)):
            if value < 0:
                continue
            row[f"{name}_sum"] = value in grads
            if value not in grads:
                # A gradient that a sum hands on unchanged stays where it is.
                can_pass = op.kind == "add" and factor == 1 and op.a != op.b
                if can_pass and not is_passed_on and dout is not None:
                    grads[value], is_passed_on = dout, True
                else:
                    grads[value] = arena.take()
            row[f"d{name}"] = grads[value]
        row["dout"] = 0 if dout is None else dout
        row["w_sum"] = op.weights in written
        written.add(op.weights)
        if dout is not None and not is_passed_on:
            arena.give(dout)
    return table

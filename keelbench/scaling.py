"""Loss and Max LR against depth: at a fixed width, or at a fixed number of parameters.

The second asks the question of the paper's table 5: is a budget better spent on depth or on
width? Widths are solved for, so that every shape has nearly the same number of parameters.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from keelbench.archs import make_rule
from keelbench.errors import KeelbenchError
from keelbench.layout import layout, parameter_count
from keelbench.lrsweep import LrSweep, relation_rows
from keelbench.lrsweep import summary_rows as lr_rows
from keelbench.records import Record
from keelbench.specs import HEAD_DIM, PAPER_WIDTH, CellSpec, ModelSpec

WIDTH_STEP = HEAD_DIM
"""Widths are whole numbers of heads."""

WIDEST = 16384
"""Where the search for a width ends."""

MOST_OFF = 0.10
"""A shape whose parameters miss the budget by more than this is refused: between two widths
that a head dimension allows, no closer one exists."""


def parameters_of(model: ModelSpec, vocab: int) -> int:
    """Parameters of one lane, embedding and head included."""
    return parameter_count(layout(model, make_rule(model.arch), vocab))


def solve_width(model: ModelSpec, budget: int, vocab: int) -> ModelSpec:
    """The same model at the width whose number of parameters is nearest to the budget.

    Heads, KV heads and hidden size follow the width. Nearest is meant in ratio.

    Raises:
        KeelbenchError: if no width comes within 10 % of the budget.
    """
    if budget < 1:
        raise KeelbenchError(f"parameters is {budget}: it must be at least 1")
    free = replace(model, heads=None, kv_heads=None, hidden=None, init_std=None)
    best, best_miss = None, math.inf
    for width in range(WIDTH_STEP, WIDEST + 1, WIDTH_STEP):
        shape = replace(free, width=width)
        if shape.problems():
            continue
        count = parameters_of(shape, vocab)
        miss = abs(math.log(count / budget))
        if miss < best_miss:
            best, best_miss = shape, miss
        if count > budget:
            break
    assert best is not None
    if best_miss > math.log1p(MOST_OFF):
        raise KeelbenchError(
            f"no width at depth {model.depth} comes within {MOST_OFF:.0%} of {budget:,} "
            f"parameters: the nearest, {best.width}, has {parameters_of(best, vocab):,}",
            "give another budget or other depths",
        )
    return best


def depth_cells(base: CellSpec, archs: Sequence[str], depths: Sequence[int]) -> list[CellSpec]:
    """A cell per architecture and depth, all as wide as ``base``."""
    return [
        replace(base, model=replace(base.model, arch=arch, depth=depth))
        for arch in archs
        for depth in depths
    ]


def budget_cells(
    base: CellSpec, archs: Sequence[str], depths: Sequence[int], budget: int, vocab: int
) -> list[CellSpec]:
    """A cell per architecture and depth, all with nearly ``budget`` parameters.

    Slope and peak follow the width again, so that normalized LRs rise alike.
    """
    return [
        replace(
            base,
            model=solve_width(replace(base.model, arch=arch, depth=depth), budget, vocab),
            ramp=replace(base.ramp, slope=None, peak=None),
        )
        for arch in archs
        for depth in depths
    ]


def scaling_rows(
    sweeps: Sequence[LrSweep], records: Sequence[Record], vocab: int
) -> list[dict[str, Any]]:
    """One row per cell: shape, parameters, best loss and LR, and Max LR where it is known."""
    limits = {
        (row["arch"], row["depth"], row["width"]): row for row in relation_rows(sweeps, records)
    }
    rows = []
    for sweep, row in zip(sweeps, lr_rows(sweeps), strict=True):
        found = limits.get((row["arch"], row["depth"], row["width"]), {})
        scale = row["width"] / PAPER_WIDTH
        limit = {f"max_lr{end}": found.get(f"max_lr{end}") for end in ("", "_low", "_high")}
        rows.append(
            {
                "arch": row["arch"],
                "depth": row["depth"],
                "width": row["width"],
                "parameters": parameters_of(sweep.cell.model, vocab),
                "steps": row["steps"],
                "seeds": row["seeds"],
                "loss": row["loss"],
                "loss_low": row["loss_low"],
                "loss_high": row["loss_high"],
                "best_lr": row["best_lr"],
                **limit,
                **{
                    name.replace("max_lr", "normalized"): None if lr is None else lr * scale
                    for name, lr in limit.items()
                },
            }
        )
    return rows

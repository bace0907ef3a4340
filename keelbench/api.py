"""The public API: the same records that the command line prints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keelbench.records import Record
from keelbench.store import Store
from keelbench.sweep import run_cells
from keelbench.sweep_spec import make_cell


def find_max_lr(
    arch: str = "keel",
    *,
    seeds: int | Sequence[int] = 3,
    out: Path | str = "results/maxlr",
    workers: int | None = None,
    fresh: bool = False,
    **settings: Any,
) -> list[Record]:
    """Measure the Max LR of one architecture: one record per seed.

    Args:
        arch: name of the residual rule, with parameters if any.
        seeds: how many lanes, or which seeds.
        out: results folder; lanes stored there already are read, not run.
        workers: processes at once; None takes every useful core or GPU, 0 runs in this process.
        fresh: run again what is stored.
        settings: any field of a cell by its short or dotted name, such as ``depth=512``,
            ``width=64``, ``slope=1.6e-4`` or ``**{"optim.clip": 0.5}``.

    Returns:
        Records in the order of seeds. ``record.max_lr`` is None where there is no value:
        look at ``record.verdict``, and at ``record.lower_bound`` for a surviving lane.

    Raises:
        KeelbenchError: for any setting that is unknown or out of range.

    Example:
        >>> from keelbench import find_max_lr
        >>> records = find_max_lr("pre_ln", depth=16, width=32, seeds=2)  # doctest: +SKIP
    """
    chosen = range(seeds) if isinstance(seeds, int) else seeds
    cell = make_cell({"arch": arch, **settings})
    return run_cells([cell], list(chosen), Store(out), workers, is_fresh=fresh)

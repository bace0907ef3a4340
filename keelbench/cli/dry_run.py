"""``--dry-run``: what a sweep would run and cost, without touching a device."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keelbench.specs import CellSpec, DataSpec
    from keelbench.store import Store
    from keelbench.sweep_spec import SweepSpec

TIMED_STEPS = 4
"""Steps timed per cell with ``--estimate``, after one to warm up."""


def print_plan(sweep: "SweepSpec", store: "Store", *, is_timed: bool) -> None:
    """One line per cell: size, steps, memory, time, and what is stored already."""
    from keelbench.archs import make_rule
    from keelbench.cli.progress import duration
    from keelbench.errors import KeelbenchError
    from keelbench.layout import layout, parameter_count
    from keelbench.memory import estimate_memory
    from keelbench.report.cells import setting_of, varying_settings
    from keelbench.report.numbers import plain_value
    from keelbench.sweep import expected_steps, make_launcher, pending_seeds

    vocabulary = _vocabularies(sweep.cells)
    varying = varying_settings(sweep.cells)
    rows: list[tuple[str, ...]] = []
    total = 0.0
    for cell in sweep.cells:
        vocab = vocabulary[cell.data]
        pending = pending_seeds(cell, sweep.seeds, store)
        size = parameter_count(layout(cell.model, make_rule(cell.model.arch), vocab))
        memory = estimate_memory(cell, vocab, max(1, len(pending))) / 2**20
        seconds = _seconds_per_step(cell, len(pending)) if is_timed and pending else None
        time = "-"
        if seconds is not None:
            total += seconds * expected_steps(cell)
            time = duration(seconds * expected_steps(cell))
        rows.append(
            (
                cell.model.arch,
                str(cell.model.depth),
                str(cell.model.width),
                *(plain_value(setting_of(cell, name)) for name in varying),
                f"{len(pending)}/{len(sweep.seeds)}",
                f"{size:,}",
                f"~{expected_steps(cell):,}",
                f"{cell.ramp.steps:,}",
                f"{memory:,.0f}",
                time,
            )
        )
    settings = [name.rpartition(".")[2] for name in varying]
    sizes = ("to run", "params", "steps", "at most", "MiB", "time")
    _print_table(("arch", "L", "width", *settings, *sizes), rows)
    try:
        _, workers = make_launcher(sweep.cells, None)
        print(f"\nresults would go to {store.folder}; {workers} workers")
    except KeelbenchError as error:  # a plan for another machine
        workers = 1
        print(f"\nresults would go to {store.folder}; not on this machine: {error.message}")
    if is_timed:
        print(
            f"about {duration(total / workers)} in all (timed over {TIMED_STEPS} steps a cell)"
        )
    else:
        print("steps and memory are estimates; --estimate times a few steps of each cell")


def _print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        cells = [f"{row[0]:<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def _vocabularies(cells: "tuple[CellSpec, ...]") -> "dict[DataSpec, int]":
    """Vocabulary of each kind of data; opens the data, so that a missing file is told now."""
    from keelbench.data import open_source

    return {data: open_source(data).vocab for data in {cell.data for cell in cells}}


def _seconds_per_step(cell: "CellSpec", lanes: int) -> float:
    """Measured on this machine: the median of a few steps with all lanes at once."""
    import time

    import numpy as np

    from keelbench.engine import Engine
    from keelbench.search import threads

    with threads(cell.threads):
        engine = Engine(cell, range(lanes), TIMED_STEPS + 1)
        taken = []
        for _ in range(TIMED_STEPS + 1):
            started = time.perf_counter()
            engine.advance(np.zeros((1, lanes)))
            engine.losses()
            taken.append(time.perf_counter() - started)
    return float(np.median(taken[1:]))

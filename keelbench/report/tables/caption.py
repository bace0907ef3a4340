"""The lines below a table: without them its numbers cannot be read."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keelbench.report.names import title_of
from keelbench.report.numbers import seeds_text, short
from keelbench.report.summary import BEST, TIED, Row
from keelbench.stats import MIN_VALUES


def caption(rows: Sequence[Row], varying: Sequence[str] = ()) -> str:
    """Settings on one line: slope, batch, data, precision, protocol, detector, seeds.

    A setting with a column of its own is not repeated.
    """
    columns = {name.rpartition(".")[2] for name in varying}
    parts = [
        ("", f"width {_all(rows, 'width')}"),
        ("slope", f"slope {_all(rows, 'slope', short)} LR/step"),
        ("batch", f"batch {_all(rows, 'batch')} × {_all(rows, 'seq')} tokens"),
        ("source", f"data {_all(rows, 'data')}"),
        ("dtype", f"{_all(rows, 'dtype')} on {_all(rows, 'device')}"),
        ("protocol", f"{_all(rows, 'protocol')} protocol"),
        ("", f"detector {_all(rows, 'detector')}"),
        ("", " / ".join(dict.fromkeys(_seeds(row) for row in rows))),
    ]
    return " · ".join(text for name, text in parts if name not in columns)


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """What the marks mean, and what is not claimed."""
    standings = {row["standing"] for row in rows}
    if BEST in standings:
        tied = (
            "; ~ not distinguishable from it (the interval of their paired ratio includes 1)"
            if TIED in standings
            else ""
        )
        yield f"* highest at its depth among equal settings{tied}"
    yield "normalized: Max LR × width / 1024"
    with_value = [row for row in rows if row["max_lr"] is not None]
    if any(row["n"] < MIN_VALUES for row in with_value):
        yield f"fewer than {MIN_VALUES} seeds with a value: no interval is claimed"
    if any(row["censored"] for row in rows):
        yield (
            ">= some lanes reached the peak of the ramp in good health: only a lower bound "
            "is known, and it never enters a mean as a value; raise ramp.peak to find it"
        )
    for row in rows:
        if row["reason"]:
            yield f"{title_of(row['arch'])} at depth {row['depth']}: {row['reason']}"


def _all(rows: Sequence[Row], name: str, text: Callable[[Any], str] = str) -> str:
    values = sorted({row[name] for row in rows})
    return " / ".join(text(value) for value in values)


def _seeds(row: Row) -> str:
    return seeds_text(map(int, row["seeds"].split()))

"""Two sets of records side by side: which cell corresponds to which, and their ratio."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keelbench.records import Record
from keelbench.report.cells import SHAPE, Cell, group, setting_of, varying_settings
from keelbench.report.numbers import plain_value
from keelbench.report.summary import Row, ratio_of, rows_of, summarise
from keelbench.specs import FIELD_NAMES
from keelbench.stats import Estimate


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """A cell with its row of the summary."""

    row: Row
    cell: Cell


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One cell in both sets; a side is None where the set lacks it."""

    first: Side | None
    second: Side | None

    @property
    def either(self) -> Side:
        side = self.first or self.second
        assert side is not None
        return side

    @property
    def ratio(self) -> Estimate | None:
        """Second over first, paired by seed; None if a lane survived or no seed is shared."""
        if self.first is None or self.second is None:
            return None
        ratio = ratio_of(self.second.cell, self.first.cell)
        return None if ratio is None or ratio.mean is None else ratio

    @property
    def differences(self) -> list[str]:
        """``data.batch 8 -> 16`` for every setting in which the two sides differ."""
        if self.first is None or self.second is None:
            return []
        first, second = self.first.cell, self.second.cell
        values = [
            (name, setting_of(first.spec, name), setting_of(second.spec, name))
            for name in FIELD_NAMES
        ]
        values.append(("detector", first.detector, second.detector))
        return [
            f"{name} {plain_value(before)} -> {plain_value(after)}"
            for name, before, after in values
            if before != after
        ]


def pair_cells(first: Sequence[Record], second: Sequence[Record]) -> list[Pair]:
    """Cells that correspond, in order of depth, width and architecture.

    Equal cells are paired first. What is left is paired if architecture, depth, width and
    the settings that vary within either set agree, so that a change that concerns a whole
    set, such as another batch size, does not leave everything without a partner.

    Raises:
        KeelbenchError: if a set has no records.
    """
    left, right = _sides(first), _sides(second)
    varying = {name for sides in (left, right) for name in _varying(sides)}
    pairs = _matched(left, right, lambda side: (side.cell.id, side.cell.detector))
    pairs += _matched(left, right, lambda side: (side.cell.id,))
    names = [*SHAPE, *sorted(varying)]
    pairs += _matched(
        left, right, lambda side: tuple(setting_of(side.cell.spec, name) for name in names)
    )
    pairs += [Pair(side, None) for side in left] + [Pair(None, side) for side in right]
    return sorted(pairs, key=lambda pair: _order(pair.either))


def _sides(records: Sequence[Record]) -> list[Side]:
    cells = {(cell.id, cell.detector): cell for cell in group(records)}
    rows = rows_of(summarise(records))
    return [Side(row, cells[row["cell"], row["detector"]]) for row in rows]


def _varying(sides: Sequence[Side]) -> list[str]:
    return varying_settings([side.cell.spec for side in sides])


def _matched(
    left: list[Side], right: list[Side], key: Callable[[Side], tuple[Any, ...]]
) -> list[Pair]:
    """Take the sides whose key occurs once in both lists out of them, as pairs."""
    pairs = []
    for side in list(left):
        mine = [other for other in left if key(other) == key(side)]
        theirs = [other for other in right if key(other) == key(side)]
        if len(mine) == len(theirs) == 1:
            pairs.append(Pair(side, theirs[0]))
            left.remove(side)
            right.remove(theirs[0])
    return pairs


def _order(side: Side) -> tuple[Any, ...]:
    row = side.row
    return (row["depth"], row["width"], row["setting"], row["rank"], row["arch"])

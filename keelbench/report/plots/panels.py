"""What goes into which panel of a figure, and what its LR axis means."""

from collections.abc import Sequence
from dataclasses import dataclass

from keelbench.records import Record
from keelbench.report.cells import Cell, group, setting_of, varying_settings
from keelbench.report.numbers import plain_value, short
from keelbench.report.summary import Row, rows_of, summarise
from keelbench.specs import PAPER_WIDTH


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """Cells that are drawn together, and what they have in common."""

    title: str
    rows: tuple[Row, ...]
    cells: tuple[Cell, ...]
    """In the order of the rows."""


@dataclass(frozen=True, slots=True)
class LrAxis:
    """The LR as it is applied or, where widths differ, normalized to width 1024."""

    normalized: bool
    settings: str
    """What all cells share and the number depends on: ``slope 1.6e-4 per step, width 64``."""

    def factor(self, cell: Cell) -> float:
        return cell.spec.model.width / PAPER_WIDTH if self.normalized else 1.0

    def label(self, quantity: str) -> str:
        unit = " × width / 1024" if self.normalized else ""
        return f"{quantity}{unit} ({self.settings})" if self.settings else quantity + unit


def panels_of(records: Sequence[Record]) -> list[Panel]:
    """A panel per setting, in order of depth and width; the highest Max LR comes first.

    Raises:
        KeelbenchError: if there are no records.
    """
    cells = {(cell.id, cell.detector): cell for cell in group(records)}
    by_setting: dict[str, list[Row]] = {}
    for row in rows_of(summarise(records)):
        by_setting.setdefault(row["setting"], []).append(row)
    shown = ["model.depth", *_shown(list(cells.values()))]
    return [
        Panel(
            title=_title(cells[rows[0]["cell"], rows[0]["detector"]], shown),
            rows=tuple(rows),
            cells=tuple(cells[row["cell"], row["detector"]] for row in rows),
        )
        for rows in by_setting.values()
    ]


def families_of(panels: Sequence[Panel]) -> list[Panel]:
    """The same cells with all depths of a setting in one panel."""
    shown = _shown([cell for panel in panels for cell in panel.cells])
    found: dict[str, list[tuple[Row, Cell]]] = {}
    for panel in panels:
        for row, cell in zip(panel.rows, panel.cells, strict=True):
            found.setdefault(cell.family, []).append((row, cell))
    return [
        Panel(
            title=_title(points[0][1], shown),
            rows=tuple(row for row, _ in points),
            cells=tuple(cell for _, cell in points),
        )
        for points in found.values()
    ]


def panel_titles(cells: Sequence[Cell]) -> list[str]:
    """For each cell, what it shares with all that belong into one panel."""
    shown = ["model.depth", *_shown(cells)]
    return [_title(cell, shown) for cell in cells]


def lr_axis(cells: Sequence[Cell]) -> LrAxis:
    """The LR axis that all of these cells can share."""
    widths = {cell.spec.model.width for cell in cells}
    slopes = {cell.spec.ramp.slope for cell in cells}
    parts = [f"slope {short(slope or 0.0)} per step" for slope in slopes if len(slopes) == 1]
    parts += [f"width {width}" for width in widths if len(widths) == 1]
    return LrAxis(normalized=len(widths) > 1, settings=", ".join(parts))


def setting_label(name: str, value: object) -> str:
    """``slope 4e-5``, ``batch 16``."""
    return f"{name.rpartition('.')[2].replace('_', ' ')} {plain_value(value)}"


def _shown(cells: Sequence[Cell]) -> list[str]:
    """Dotted settings, other than the depth, that tell the panels apart."""
    specs = [cell.spec for cell in cells]
    many_widths = len({spec.model.width for spec in specs}) > 1
    return [*(["model.width"] if many_widths else []), *varying_settings(specs)]


def _title(cell: Cell, shown: Sequence[str]) -> str:
    parts = [setting_label(name, setting_of(cell.spec, name)) for name in shown]
    return ", ".join(parts)

"""Max LR against depth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from keelbench.records import Record
from keelbench.report.numbers import lr_text
from keelbench.report.plots.canvas import (
    at_least_arrow,
    calm,
    log_axis,
    message,
    padded,
    spread,
    styled,
)
from keelbench.report.plots.looks import COLUMN_INCHES, INK, MUTED, PAPER, Look, looks_of
from keelbench.report.plots.panels import LrAxis, Panel, families_of, lr_axis, panels_of

DODGE = 0.011
"""Architectures are moved apart by this share of the axis, so that intervals stay visible."""

LABEL_INCHES = 0.12
"""Least distance of two labels at the right."""


@dataclass(frozen=True, slots=True)
class Point:
    """One cell in the plot: a value with its interval, or a lower bound."""

    depth: int
    value: float
    low: float
    high: float
    is_bound: bool


@styled
def depth_figure(
    records: Sequence[Record], *, width: float = COLUMN_INCHES, height: float | None = None
) -> Figure:
    """Max LR against depth, both on log axes: a line per architecture, with intervals.

    A lower bound is a hollow marker with an arrow. One panel per setting, if several differ.

    Args:
        records: of any number of cells.
        width: of the figure, in inches.
        height: of one panel, in inches.

    Raises:
        KeelbenchError: if there are no records.
    """
    panels = families_of(panels_of(records))
    cells = [cell for panel in panels for cell in panel.cells]
    looks = looks_of(cell.spec.model.arch for cell in cells)
    lr = lr_axis(cells)
    height = height or 0.72 * min(width, COLUMN_INCHES)
    figure = Figure(figsize=(width, height * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)
    depths = sorted({cell.spec.model.depth for cell in cells})
    series = [_series(panel, lr) for panel in panels]
    limits = _limits(series)
    for axes, panel, lines in zip(grid[:, 0], panels, series, strict=True):
        axes.set_title(panel.title, loc="left", pad=3, color=MUTED)
        log_axis(axes, "y", *limits, text=lr_text)
        _depth_axis(axes, depths)
        calm(axes, "y")
        _draw(axes, lines, looks, height, limits)
        axes.set_ylabel("Max LR" + (" × width / 1024" if lr.normalized else ""))
    last = grid[-1, 0]
    last.set_xlabel("depth in sub-layers" + (f" ({lr.settings})" if lr.settings else ""))
    return figure


def _series(panel: Panel, lr: LrAxis) -> dict[str, list[Point]]:
    """The points of each architecture by depth; cells without any value are left out."""
    found: dict[str, list[Point]] = {}
    for row, cell in zip(panel.rows, panel.cells, strict=True):
        value = row["max_lr"] if row["max_lr"] is not None else row["max_lr_low"]
        if value is None:
            continue
        is_bound = row["max_lr"] is None
        ends = (row["max_lr_low"], row["max_lr_high"])
        low, high = (value if is_bound or end is None else end for end in ends)
        factor = lr.factor(cell)
        point = Point(row["depth"], value * factor, low * factor, high * factor, is_bound)
        found.setdefault(row["arch"], []).append(point)
    return {
        arch: sorted(points, key=lambda point: point.depth) for arch, points in found.items()
    }


def _draw(
    axes: Axes,
    series: dict[str, list[Point]],
    looks: dict[str, Look],
    height: float,
    limits: tuple[float, float],
) -> None:
    if not series:
        message(axes, "no lane has a Max LR")
        return
    left, right = axes.get_xlim()
    order = sorted(series, key=lambda arch: series[arch][-1].value)
    alone = len({point.depth for points in series.values() for point in points}) == 1
    dodge = min(0.1, 0.6 / len(order)) if alone else DODGE
    for position, arch in enumerate(order):
        shift = (right / left) ** (dodge * (position - (len(order) - 1) / 2))
        _draw_line(axes, series[arch], looks[arch], shift)
    wishes = [_share(series[arch][-1].value, limits) for arch in order]
    places = spread(wishes, LABEL_INCHES / (0.75 * height))
    for arch, place in zip(order, places, strict=True):
        _label(axes, looks[arch], place)


def _draw_line(axes: Axes, points: Sequence[Point], look: Look, shift: float) -> None:
    x = [point.depth * shift for point in points]
    axes.plot(
        x,
        [point.value for point in points],
        color=look.color,
        linestyle=look.dash,
        linewidth=1.1,
        zorder=2,
    )
    for depth, point in zip(x, points, strict=True):
        axes.plot([depth, depth], [point.low, point.high], color=look.color, linewidth=1.2)
        axes.plot(
            depth,
            point.value,
            look.marker,
            markersize=4.5,
            markerfacecolor=PAPER if point.is_bound else look.color,
            markeredgecolor=look.color if point.is_bound else PAPER,
            markeredgewidth=0.9 if point.is_bound else 0.5,
            zorder=3,
        )
        if point.is_bound:
            at_least_arrow(axes, depth, point.value, look.color, (0, 12))


def _label(axes: Axes, look: Look, place: float) -> None:
    """Marker and name beside the end of the line: no legend to look things up in."""
    axes.plot(
        1.035,
        place,
        look.marker,
        transform=axes.transAxes,
        color=look.color,
        markersize=4,
        markeredgewidth=0,
        clip_on=False,
    )
    axes.annotate(
        look.axis_title,
        (1.035, place),
        xycoords="axes fraction",
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        color=INK,
        fontsize=7,
        annotation_clip=False,
    )


def _depth_axis(axes: Axes, depths: Sequence[int]) -> None:
    low, high = depths[0], depths[-1]
    margin = (high / low) ** 0.07 if high > low else 1.5
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / margin, high * margin)
    axes.xaxis.set_major_locator(FixedLocator(list(depths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")


def _limits(series: Sequence[dict[str, list[Point]]]) -> tuple[float, float]:
    points = [point for lines in series for line in lines.values() for point in line]
    if not points:
        return 1e-4, 1e-1
    low, high = padded(min(p.low for p in points), max(p.high for p in points))
    has_bounds = any(point.is_bound for point in points)
    return low, high * (high / low) ** 0.08 if has_bounds else high


def _share(value: float, limits: tuple[float, float]) -> float:
    """Position on the log axis, 0 at the bottom and 1 at the top."""
    low, high = limits
    return math.log(value / low) / math.log(high / low)

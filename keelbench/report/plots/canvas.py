"""What all figures share: style, axes, the ticks of log axes, saving."""

import functools
import io
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from keelbench.report.numbers import short
from keelbench.report.plots.looks import GRID, MUTED, STYLE, Look

P = ParamSpec("P")

DPI = 200
"""Dots per inch of a PNG: sharp at the size at which it is printed."""


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw with the settings of keelbench, whatever those of the process are."""

    @functools.wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.style.context(STYLE, after_reset=True):
            return draw(*args, **kwargs)

    return wrapper


def save(figure: Figure, path: Path | str) -> list[Path]:
    """Write ``path``.png (200 dpi) and ``path``.svg: the same figure gives the same bytes."""
    paths = [Path(f"{path}.png"), Path(f"{path}.svg")]
    paths[0].write_bytes(_written(figure, "png", {"Software": None}))
    paths[1].write_bytes(_written(figure, "svg", {"Date": None, "Creator": None}))
    return paths


def svg_text(figure: Figure) -> str:
    """The figure as SVG on a transparent ground."""
    meta = {"Date": None, "Creator": None, "Format": None, "Type": None}
    return _written(figure, "svg", meta, transparent=True).decode()


def _written(figure: Figure, kind: str, metadata: Mapping[str, Any], **options: Any) -> bytes:
    file = io.BytesIO()
    with matplotlib.style.context(STYLE, after_reset=True):
        figure.savefig(file, format=kind, dpi=DPI, metadata=metadata, **options)
    return file.getvalue()


def log_axis(
    axes: Axes,
    which: str,
    low: float,
    high: float,
    *,
    labels: int = 6,
    text: Callable[[float], str] = short,
) -> None:
    """A log axis from ``low`` to ``high`` (positive) with at most ``labels`` round ticks."""
    if not high > low:
        low, high = low / 1.5, high * 1.5
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    axis.set_major_locator(FixedLocator(log_ticks(low, high, labels)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    minor = [m * 10.0**e for e in decades for m in range(1, 10) if low <= m * 10.0**e <= high]
    axis.set_minor_locator(FixedLocator(minor))
    axis.set_minor_formatter(NullFormatter())


MANTISSAS = ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,))
"""Round numbers within a decade, from dense to sparse."""


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """The densest series of round numbers in [low, high] with no more than ``most``."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for stride in (1, 2, 3, 4):
        for mantissas in MANTISSAS if stride == 1 else MANTISSAS[-1:]:
            ticks = [
                m * 10.0**e
                for e in decades
                if e % stride == 0
                for m in mantissas
                if low * 0.9999 <= m * 10.0**e <= high * 1.0001
            ]
            if len(ticks) == 1 and stride == 1 and mantissas is MANTISSAS[0]:
                break
            if 2 <= len(ticks) <= most:
                return ticks
    linear = MaxNLocator(nbins=min(most, 4)).tick_values(low, high)
    return [float(tick) for tick in linear if low <= tick <= high and tick > 0]


def calm(axes: Axes, grid: str = "x") -> None:
    """Thin ticks and a faint grid behind the data."""
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, which="major", color=GRID, linewidth=0.5)  # type: ignore[arg-type]
    axes.tick_params(which="major", length=3, width=0.6, pad=2)
    axes.tick_params(which="minor", length=1.5, width=0.4)


def message(axes: Axes, text: str) -> None:
    """Say in words what cannot be drawn."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED)


def at_least_arrow(
    axes: Axes, x: float, y: float, color: str, direction: tuple[int, int] = (13, 0)
) -> None:
    """From a lower bound, in points: the true value lies in this direction."""
    axes.annotate(
        "",
        (x, y),
        xytext=direction,
        textcoords="offset points",
        arrowprops={"arrowstyle": "<-", "color": color, "linewidth": 0.9, "shrinkA": 0},
        annotation_clip=False,
    )


def handle(look: Look, with_line: bool = True) -> Line2D:
    """The legend entry of an architecture."""
    return Line2D(
        [],
        [],
        color=look.color,
        marker=look.marker,
        linestyle=look.dash if with_line else "none",
        markersize=4,
        linewidth=1.2,
        markeredgewidth=0,
        label=look.title,
    )


LETTER_INCHES = 0.055
"""Average width of a letter in labels and legends."""

LR_LABEL_INCHES = 0.38
"""Width that an LR takes below its tick, with some air."""


def label_room(looks: Iterable[Look], width: float) -> int:
    """How many LRs fit below an axis with names at its left and numbers at its right."""
    lines = [line for look in looks for line in look.axis_title.split("\n")]
    room = width - 0.75 - LETTER_INCHES * max(map(len, lines))
    return max(2, int(room / LR_LABEL_INCHES))


LEAST_SPAN = 1.3
"""A log axis never shows less than this factor: tiny differences should look tiny."""


def padded(low: float, high: float, share: float = 0.06) -> tuple[float, float]:
    """Limits of a log axis that leave a margin around the data."""
    if high < low * LEAST_SPAN:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(LEAST_SPAN), middle * math.sqrt(LEAST_SPAN)
    margin = (high / low) ** share
    return low / margin, high * margin


def spread(positions: list[float], gap: float) -> list[float]:
    """Move positions apart until neighbours are ``gap`` apart, as little as possible.

    Runs of crowded labels become blocks around the mean of their wishes (pool adjacent
    violators), so the order never changes.
    """
    order = np.argsort(positions, kind="stable")
    blocks: list[list[float]] = []
    for index in order:
        blocks.append([positions[index]])
        while len(blocks) > 1 and _top(blocks[-2], gap) + gap > _bottom(blocks[-1], gap):
            last = blocks.pop()
            blocks[-1] += last
    placed = [
        _bottom(block, gap) + gap * rank for block in blocks for rank in range(len(block))
    ]
    result = [0.0] * len(positions)
    for index, value in zip(order, placed, strict=True):
        result[index] = value
    return result


def _bottom(block: list[float], gap: float) -> float:
    return sum(block) / len(block) - gap * (len(block) - 1) / 2


def _top(block: list[float], gap: float) -> float:
    return sum(block) / len(block) + gap * (len(block) - 1) / 2

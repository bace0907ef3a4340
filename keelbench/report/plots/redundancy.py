"""What it costs to leave a layer out, against depth."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keelbench.report.plots.canvas import log_axis, message, padded, styled
from keelbench.report.plots.looks import MUTED, PAPER, Look
from keelbench.report.plots.study_panels import (
    DOTTED,
    Row,
    by,
    label_rows,
    legend,
    looks_in,
    panels,
)

CHEAP = 0.01
"""The line at which a removal counts as cheap: 1 % of the perplexity."""

FLOOR = 1e-4
"""Share of the perplexity at which the axis ends; what costs less, or helps, is drawn there
as a hollow marker."""


@styled
def redundancy_figure(rows: Sequence[Row], *, width: float | None = None) -> Figure:
    """Relative rise of the perplexity without each layer, log axis, a panel per depth.

    Args:
        rows: ``layer_rows`` of any number of cells.
        width: of the figure, in inches.

    Raises:
        KeelbenchError: if there are no rows.
    """
    looks = looks_in(rows)
    shapes = by(rows, "depth", "width", "unit")
    figure, grid = panels(
        [f"L = {depth}, width {width}" for depth, width, _ in shapes], width=width
    )
    for axes, ((_, _, unit), found) in zip(grid, shapes.items(), strict=True):
        _draw(axes, found, looks)
        axes.set_xlabel(unit)
    label_rows(grid, "ΔPPL / PPL")
    cheap = {f"{CHEAP:.0%} of PPL": {"linestyle": DOTTED, "linewidth": 0.7}}
    legend(figure, looks.values(), strokes=cheap)
    return figure


def _draw(axes: Axes, rows: Sequence[Row], looks: dict[str, Look]) -> None:
    shares = [row["delta_share"] for row in rows if row["delta_share"] < float("inf")]
    if not shares:
        message(axes, "nothing finite was measured")
        return
    log_axis(axes, "y", *padded(FLOOR, max(*shares, 2 * CHEAP)), labels=6)
    axes.axhline(CHEAP, color=MUTED, linewidth=0.7, linestyle=DOTTED)
    for arch, found in by(rows, "arch").items():
        look = looks[arch]
        shown = [max(row["delta_share"], FLOOR) for row in found]
        x = [row["index"] for row in found]
        axes.plot(x, shown, color=look.color, linestyle=look.dash, linewidth=0.9, zorder=2)
        for index, row, y in zip(x, found, shown, strict=True):
            is_below = row["delta_share"] < FLOOR
            axes.plot(
                index,
                y,
                look.marker,
                markersize=3.5,
                markerfacecolor=PAPER if is_below else look.color,
                markeredgecolor=look.color,
                markeredgewidth=0.6,
                zorder=3,
            )

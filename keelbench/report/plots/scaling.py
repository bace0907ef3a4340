"""Loss and Max LR against depth, at a fixed width or a fixed number of parameters."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from keelbench.report.numbers import lr_text
from keelbench.report.plots.canvas import log_axis, message, padded, styled
from keelbench.report.plots.study_panels import (
    Row,
    apart,
    by,
    finite,
    legend,
    line,
    looks_in,
    panels,
)


@styled
def scaling_figure(rows: Sequence[Row], *, width: float | None = None) -> Figure:
    """Best held-out loss and Max LR against depth, a line per architecture.

    Where the width changes with the depth, it stands below the depth, and Max LR is
    normalized to width 1024.

    Args:
        rows: ``scaling_rows``.
        width: of the figure, in inches.

    Raises:
        KeelbenchError: if there are no rows.
    """
    looks = looks_in(rows)
    widths = {row["width"] for row in rows}
    limit = "max_lr" if len(widths) == 1 else "normalized"
    figure, (loss, max_lr) = panels(["held-out loss", "Max LR"], columns=2, width=width)
    groups = by(rows, "arch")
    depths = [row["depth"] for row in rows]
    factors = apart(len(groups), min(depths), max(depths))
    for (arch, found), moved in zip(groups.items(), factors, strict=True):
        line(loss, found, looks[arch], "depth", "loss", moved=moved)
        line(max_lr, found, looks[arch], "depth", limit, moved=moved)
    loss.set_ylabel("nats per token")
    max_lr.set_ylabel("Max LR" if limit == "max_lr" else "Max LR × width / 1024")
    values = finite(
        row.get(f"{limit}{end}")
        for row in rows
        for end in ("", "_low", "_high")
        if row[limit] is not None
    )
    if values:
        log_axis(max_lr, "y", *padded(min(values), max(values)), text=lr_text)
    else:
        message(max_lr, "Max LR was not measured")
    for axes in (loss, max_lr):
        _depth_axis(axes, rows)
    legend(figure, looks.values())
    return figure


def _depth_axis(axes: Axes, rows: Sequence[Row]) -> None:
    shapes = {row["depth"]: row["width"] for row in rows}
    depths = sorted(shapes)
    is_fixed = len(set(shapes.values())) == 1
    margin = (depths[-1] / depths[0]) ** 0.07 if len(depths) > 1 else 1.5
    axes.set_xscale("log", base=2)
    axes.set_xlim(depths[0] / margin, depths[-1] * margin)
    axes.xaxis.set_major_locator(FixedLocator(depths))
    axes.xaxis.set_minor_locator(NullLocator())
    labels = [str(d) if is_fixed else f"{d}\n× {shapes[d]}" for d in depths]
    axes.set_xticklabels(labels)
    same = f", width {shapes[depths[0]]}" if is_fixed else " × width"
    axes.set_xlabel(f"depth in sub-layers{same}")

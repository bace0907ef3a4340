"""Accuracy beside loss on tasks with known answers."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from keelbench.report.plots.canvas import styled
from keelbench.report.plots.looks import MUTED, PAPER
from keelbench.report.plots.study_panels import (
    DOTTED,
    Row,
    by,
    label_rows,
    legend,
    looks_in,
    panels,
)


@styled
def task_figure(rows: Sequence[Row], *, width: float | None = None) -> Figure:
    """Accuracy against held-out loss, a panel per task: a point per cell, with intervals.

    Where a point lies to the left of another and below it, the lower loss goes with the lower
    accuracy. The dotted line is the accuracy of guessing.

    Args:
        rows: ``summary_rows`` of task scores.
        width: of the figure, in inches.

    Raises:
        KeelbenchError: if there are no rows.
    """
    looks = looks_in(rows)
    tasks = by(rows, "task")
    figure, grid = panels(list(tasks), columns=min(2, len(tasks)), width=width)
    for axes, found in zip(grid, tasks.values(), strict=True):
        axes.axhline(found[0]["chance"], color=MUTED, linewidth=0.7, linestyle=DOTTED)
        axes.set_ylim(-0.03, 1.03)
        for row in found:
            if row["loss"] is None or row["accuracy"] is None:
                continue
            look, x, y = looks[row["arch"]], row["loss"], row["accuracy"]
            if row["loss_low"] is not None:
                axes.plot([row["loss_low"], row["loss_high"]], [y, y], color=look.color, lw=0.9)
            if row["accuracy_low"] is not None:
                ends = [row["accuracy_low"], row["accuracy_high"]]
                axes.plot([x, x], ends, color=look.color, lw=0.9)
            axes.plot(
                x,
                y,
                look.marker,
                color=look.color,
                markersize=5,
                markeredgecolor=PAPER,
                markeredgewidth=0.5,
                zorder=3,
            )
        axes.set_xlabel("held-out loss (nats per token)")
    label_rows(grid, "accuracy of answers")
    guessing = {"guessing": {"linestyle": DOTTED, "linewidth": 0.7}}
    legend(figure, looks.values(), strokes=guessing)
    return figure

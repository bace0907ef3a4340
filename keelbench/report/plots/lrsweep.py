"""Loss against learning rate, training curves, and Max LR against best LR."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keelbench.report.numbers import lr_text
from keelbench.report.plots.canvas import log_axis, padded, styled
from keelbench.report.plots.looks import COLUMN_INCHES, MUTED, PAPER, Look
from keelbench.report.plots.study_panels import (
    DOTTED,
    Row,
    apart,
    by,
    finite,
    label_rows,
    legend,
    line,
    looks_in,
    panels,
)


@styled
def lr_sweep_figure(rows: Sequence[Row], *, width: float | None = None) -> Figure:
    """Held-out loss against peak LR, a panel per depth and width: means and every seed.

    The dotted line is the loss at init, at which the sensitivity cuts a loss off.

    Args:
        rows: ``curve_rows`` of any number of sweeps.
        width: of the figure, in inches.

    Raises:
        KeelbenchError: if there are no rows.
    """
    looks = looks_in(rows)
    shapes = by(rows, "depth", "width")
    figure, grid = panels([f"L = {d}, width {w}" for d, w in shapes], width=width)
    for axes, found in zip(grid, shapes.values(), strict=True):
        log_axis(axes, "x", *padded(*_ends(finite(r["lr"] for r in found))), text=lr_text)
        if (limits := _loss_limits(found)) is not None:
            axes.set_ylim(limits)
        axes.axhline(found[0]["init_loss"], color=MUTED, linewidth=0.7, linestyle=DOTTED)
        groups = by(found, "arch")
        factors = apart(len(groups), *_ends(finite(row["lr"] for row in found)))
        for (arch, of_arch), moved in zip(groups.items(), factors, strict=True):
            _seeds(axes, of_arch, looks[arch], moved)
            line(axes, of_arch, looks[arch], "lr", "loss", moved=moved)
        axes.set_xlabel("peak LR")
    label_rows(grid, "held-out loss (nats per token)")
    legend(figure, looks.values())
    return figure


def _loss_limits(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Around the losses, and never far above the loss at init, however high one rises."""
    losses = [loss for row in rows for loss in finite(row["seed_losses"])]
    losses += finite(row["loss_low"] for row in rows) + finite(row["loss_high"] for row in rows)
    if not losses:
        return None
    low, high = min(losses), min(max(losses), rows[0]["init_loss"])
    margin = 0.08 * max(high - low, 0.1)
    return low - margin, high + margin


def _seeds(axes: Axes, rows: Sequence[Row], look: Look, moved: float) -> None:
    for row in rows:
        for loss in finite(row["seed_losses"]):
            axes.plot(
                row["lr"] * moved,
                loss,
                "o",
                markersize=2,
                markerfacecolor=PAPER,
                markeredgecolor=look.color,
                markeredgewidth=0.6,
            )


@styled
def training_curves_figure(rows: Sequence[Row], *, width: float | None = None) -> Figure:
    """Train loss against steps, a panel per peak LR (figures 1a and 4 of the paper).

    Args:
        rows: ``curve_rows`` of sweeps of one depth and width.
        width: of the figure, in inches.

    Raises:
        KeelbenchError: if there are no rows.
    """
    looks = looks_in(rows)
    rates = by(sorted(rows, key=lambda row: float(row["lr"])), "lr")
    figure, grid = panels([f"peak LR {lr_text(lr)}" for lr in rates], width=width)
    losses = finite(value for row in rows for value in row["curve"])
    for axes, found in zip(grid, rates.values(), strict=True):
        for row in found:
            look, curve = looks[row["arch"]], row["curve"]
            steps = [row["steps"] * (k + 0.5) / len(curve) for k in range(len(curve))]
            shown = [float("nan") if value is None else value for value in curve]
            axes.plot(steps, shown, color=look.color, linestyle=look.dash, linewidth=1.0)
        if losses:
            axes.set_ylim(min(losses) - 0.1, min(max(losses), rows[0]["init_loss"]) + 0.2)
        axes.set_xlabel("step")
    label_rows(grid, "train loss (nats per token)")
    legend(figure, looks.values(), has_markers=False)
    return figure


@styled
def relation_figure(rows: Sequence[Row], *, width: float = COLUMN_INCHES) -> Figure:
    """Max LR against best LR, a point per architecture and shape, with intervals.

    Where there are several shapes, each point says its own. On the diagonal an architecture
    trains best at the LR at which it breaks.

    Args:
        rows: ``relation_rows``.
        width: of the figure, in inches.

    Raises:
        KeelbenchError: if no row has both LRs.
    """
    found = [row for row in rows if row["best_lr"] is not None and row["max_lr"] is not None]
    looks = looks_in(found)
    figure, (axes,) = panels([_relation_title(found)], columns=1, width=width)
    values = finite(
        row[f"{name}{end}"]
        for row in found
        for name in ("best_lr", "max_lr")
        for end in ("", "_low", "_high")
    )
    limits = padded(*_ends(values))
    for which in ("x", "y"):
        log_axis(axes, which, *limits, labels=5, text=lr_text)
    axes.plot(limits, limits, color=MUTED, linewidth=0.6, linestyle=DOTTED)
    shapes = by(found, "depth", "width")
    has_widths = len({width for _, width in shapes}) > 1
    for row in found:
        _cross(axes, row, looks[row["arch"]])
        if len(shapes) > 1:
            shape = f"{row['depth']}" + (f" × {row['width']}" if has_widths else "")
            axes.annotate(
                shape,
                (row["best_lr"], row["max_lr"]),
                xytext=(4, 3),
                textcoords="offset points",
                fontsize=6,
                color=looks[row["arch"]].color,
            )
    axes.set_xlabel("best LR")
    axes.set_ylabel("Max LR")
    legend(figure, looks.values(), strokes={"equal": {"linestyle": DOTTED, "linewidth": 0.7}})
    return figure


def _relation_title(rows: Sequence[Row]) -> str:
    shapes = by(rows, "depth", "width")
    if len(shapes) == 1:
        ((depth, width),) = shapes
        return f"L = {depth}, width {width}"
    widths = {width for _, width in shapes}
    return (
        "L × width at each point"
        if len(widths) > 1
        else f"L at each point, width {min(widths)}"
    )


def _cross(axes: Axes, row: Row, look: Look) -> None:
    x, y = row["best_lr"], row["max_lr"]
    if row["best_lr_low"] is not None:
        axes.plot([row["best_lr_low"], row["best_lr_high"]], [y, y], color=look.color, lw=0.9)
    if row["max_lr_low"] is not None and row["max_lr_high"] is not None:
        axes.plot([x, x], [row["max_lr_low"], row["max_lr_high"]], color=look.color, lw=0.9)
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


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)

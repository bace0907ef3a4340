"""The figures of a page and what is said below them."""

import html
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from keelbench.records import Record
from keelbench.report.cells import group
from keelbench.report.plots import (
    comparison_figure,
    depth_figure,
    grad_norm_figure,
    has_depths,
    has_grad_norms,
    loss_figure,
    max_lr_figure,
    settings_figure,
    single_changes,
)
from keelbench.report.plots.inline import inline_svg
from keelbench.report.plots.looks import COLUMN_INCHES, PAGE_INCHES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[float], "Figure"]
"""Draws a figure of a given width in inches."""


MAX_LR = (
    "Max LR by architecture: every seed as a ring, the geometric mean and its interval below "
    "it. An arrow marks a lower bound."
)
DEPTH = (
    "Max LR against depth, with intervals. Markers are moved apart sideways where they would "
    "hide each other; an arrow marks a lower bound."
)
SETTINGS = (
    "Max LR, normalized to width 1024, against each setting that was changed alone, with "
    "intervals; the value that all other panels share is shaded. An arrow marks a lower bound."
)
LOSS = (
    "Loss against learning rate, every seed. The marker is where Max LR is read; the line is "
    "the loss of a model that has learned nothing from context. Losses far above the first "
    "one are cut off."
)
GRAD_NORM = (
    "Global gradient norm before clipping against learning rate: a line through the medians "
    "of narrow bins for every seed, over the range within the bins."
)


def all_figures(records: Sequence[Record]) -> str:
    """Every figure that these records have something to say in."""
    panels = len({cell.setting for cell in group(records)})
    found = [column_figure("max-lr", max_lr_figure(records), MAX_LR)]
    if has_depths(records):
        found.append(column_figure("depth", depth_figure(records), DEPTH))
    if changed := single_changes(records):
        drawn = _curves(
            "settings", lambda w: settings_figure(changed, width=w), len(changed), SETTINGS
        )
        found.append(drawn)
    found.append(_curves("loss", lambda w: loss_figure(records, width=w), panels, LOSS))
    if has_grad_norms(records):
        norms = _curves(
            "grad-norm", lambda w: grad_norm_figure(records, width=w), panels, GRAD_NORM
        )
        found.append(norms)
    return '<div class="figures">\n' + "\n".join(found) + "\n</div>"


def comparison(
    first: Sequence[Record], second: Sequence[Record], first_name: str, second_name: str
) -> str:
    """The one figure of a comparison."""
    figure = column_figure(
        "comparison",
        comparison_figure(first, second, first_name, second_name),
        f"Max LR with intervals: {first_name} hollow and above, {second_name} filled and "
        f"below. At the right, the ratio of {second_name} to {first_name}.",
    )
    return f'<div class="figures">\n{figure}\n</div>'


def column_figure(name: str, figure: "Figure", caption: str) -> str:
    """A figure of one column of a paper."""
    return (
        f'<figure class="column">\n{inline_svg(figure, name, caption)}\n'
        f"<figcaption>{html.escape(caption)}</figcaption>\n</figure>"
    )


def _curves(name: str, draw: Draw, panels: int, caption: str) -> str:
    """Several panels are side by side on a wide page, and below each other on a phone."""
    if panels == 1:
        return column_figure(name, draw(COLUMN_INCHES), caption)
    wide = inline_svg(draw(PAGE_INCHES), f"{name}-wide", caption)
    narrow = inline_svg(draw(COLUMN_INCHES), f"{name}-narrow", caption)
    return (
        f'<figure class="page">\n<div class="wide">{wide}</div>\n'
        f'<div class="narrow">{narrow}</div>\n'
        f"<figcaption>{html.escape(caption)}</figcaption>\n</figure>"
    )

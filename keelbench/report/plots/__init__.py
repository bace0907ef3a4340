"""Figures of results, as matplotlib objects: nothing is shown, and only ``save`` writes."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from keelbench.records import Record
from keelbench.report.cells import group
from keelbench.report.plots.canvas import save, svg_text
from keelbench.report.plots.comparison import comparison_figure
from keelbench.report.plots.curves import grad_norm_figure, loss_figure
from keelbench.report.plots.depth import depth_figure
from keelbench.report.plots.max_lr import max_lr_figure
from keelbench.report.plots.paired import PairedRow, Span, paired_figure
from keelbench.report.plots.settings import settings_figure, single_changes

__all__ = [
    "PairedRow",
    "Span",
    "comparison_figure",
    "depth_figure",
    "figures",
    "grad_norm_figure",
    "loss_figure",
    "max_lr_figure",
    "paired_figure",
    "save",
    "settings_figure",
    "single_changes",
    "svg_text",
]


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Every figure that these records have something to say in, by file name.

    Raises:
        KeelbenchError: if there are no records.
    """
    found = {"maxlr": max_lr_figure(records)}
    if has_depths(records):
        found["depth"] = depth_figure(records)
    if changed := single_changes(records):
        found["settings"] = settings_figure(changed)
    found["curves"] = loss_figure(records)
    if has_grad_norms(records):
        found["grad_norm"] = grad_norm_figure(records)
    return found


def has_depths(records: Sequence[Record]) -> bool:
    """True if any setting was measured at several depths."""
    cells = group(records)
    points = {(cell.family, cell.spec.model.depth) for cell in cells}
    return len(points) > len({cell.family for cell in cells})


def has_grad_norms(records: Sequence[Record]) -> bool:
    return any(record.trace.grad_norm is not None for record in records)

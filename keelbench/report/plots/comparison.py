"""Two sets of records side by side: baseline and current, or any two folders."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from keelbench.records import Record
from keelbench.report.pairs import Pair, Side, pair_cells
from keelbench.report.plots.looks import COLUMN_INCHES
from keelbench.report.plots.paired import PairedRow, Span, paired_figure
from keelbench.report.plots.panels import LrAxis, lr_axis, panel_titles
from keelbench.stats import estimate_records


def comparison_figure(
    first: Sequence[Record],
    second: Sequence[Record],
    first_name: str = "baseline",
    second_name: str = "current",
    *,
    notes: Mapping[str, str] | None = None,
    width: float = COLUMN_INCHES,
) -> Figure:
    """Max LR of the same cells in two sets of records, with intervals and their ratio.

    The first set is hollow and above, the second filled and below it. At the right stands
    the ratio of the second to the first, and the note on a cell.

    Args:
        first: records of one set.
        second: records of the other.
        first_name: what the first set is called.
        second_name: what the second set is called.
        notes: texts by cell hash, such as the gate's verdicts, written behind the ratio.
        width: of the figure, in inches.

    Raises:
        KeelbenchError: if a set has no records.
    """
    pairs = pair_cells(first, second)
    cells = [pair.either.cell for pair in pairs]
    sides = [side for pair in pairs for side in (pair.first, pair.second) if side is not None]
    lr = lr_axis([side.cell for side in sides])
    rows = [
        PairedRow(
            panel=title,
            arch=pair.either.cell.spec.model.arch,
            first=_span(pair.first, lr),
            second=_span(pair.second, lr),
            note="  ".join(filter(None, (ratio_text(pair), (notes or {}).get(cell.id)))),
        )
        for pair, cell, title in zip(pairs, cells, panel_titles(cells), strict=True)
    ]
    return paired_figure(rows, (first_name, second_name), label=lr.label("Max LR"), width=width)


def _span(side: Side | None, lr: LrAxis) -> Span | None:
    if side is None:
        return None
    return Span.of(estimate_records(side.cell.lanes), lr.factor(side.cell))


def ratio_text(pair: Pair) -> str:
    """``× 1.08``, or in words why there is no ratio."""
    ratio = pair.ratio
    if ratio is not None and ratio.mean is not None:
        return f"× {ratio.mean:.2f}"
    if pair.first is None or pair.second is None:
        return "one side only"
    return (
        "a bound" if pair.first.row["censored"] or pair.second.row["censored"] else "no value"
    )

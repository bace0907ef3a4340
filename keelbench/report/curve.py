"""A loss curve as text: for terminals, without colour."""

import math
from collections.abc import Sequence

import numpy as np

from keelbench.records import FloatArray, Trace
from keelbench.report.numbers import lr_text, short

BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the eight dots of a braille character, by row and column."""

GUTTER = 7
"""Characters left of the plot: the loss and the axis."""

HEADROOM_NATS = 0.2
"""The curve is cut off this much above its first value: divergence would squash the rest."""


def sparkcurve(
    trace: Trace,
    width: int = 72,
    height: int = 12,
    *,
    onset_step: int | None = None,
    encoding: str = "utf-8",
) -> str:
    """Loss against LR on a log axis, with the onset and the unigram entropy marked.

    The probe loss where there is one, else the train loss. Against steps if the LR was held.
    Without a UTF-8 terminal, stars stand for the dots.

    Args:
        trace: of one lane.
        width: of the text, in characters.
        height: of the curve, in lines; the axis takes two more.
        onset_step: where divergence starts, if it does.
        encoding: of the terminal.
    """
    x, loss = _measured(trace)
    columns = max(8, width - GUTTER - 1)
    if len(x) == 0:
        return "no finite loss was measured\n"
    fine = _is_unicode(encoding)
    across, down = (2 * columns, 4 * height) if fine else (columns, height)
    low, high = float(loss.min()), float(loss[0]) + HEADROOM_NATS
    high = high if high > low + 1e-9 else low + 1.0
    first, last = float(x[0]), float(x[-1])
    dots = _dots(np.log(x), np.clip((high - loss) / (high - low), 0, 1), across, down)
    cells = _braille(dots) if fine else _stars(dots)
    level = trace.unigram_entropy or 0.0
    row = _position(level, high, low, height) if low < level < high else None
    column = _onset_column(trace, onset_step, first, last, columns)
    _mark(cells, row, column, fine)
    labels = {0: high, height - 1: low} | ({} if row is None else {row: level})
    lines = _with_axis(cells, labels, fine)
    lines += _x_axis(columns, first, last, "step" if is_held(trace) else "LR", fine)
    if column is not None:
        lines.append(_onset_line(columns, column, onset_step or 0, trace, fine))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _onset_column(
    trace: Trace, step: int | None, first: float, last: float, columns: int
) -> int | None:
    if not step or step > trace.steps:
        return None
    at = float(step if is_held(trace) else trace.lr[step - 1])
    return _position(math.log(at), math.log(first), math.log(last), columns)


def is_held(trace: Trace) -> bool:
    """True if the LR stopped rising, as in the hold protocol."""
    return trace.steps > 2 and bool(trace.lr[-1] == trace.lr[-2])


def _measured(trace: Trace) -> tuple[FloatArray, FloatArray]:
    """LR (or steps, counted from 1) and loss wherever both can be drawn."""
    x = np.arange(1.0, trace.steps + 1) if is_held(trace) else trace.lr
    loss = trace.loss
    if trace.probe is not None and trace.probe_step is not None and len(trace.probe):
        x, loss = x[trace.probe_step], trace.probe
    usable = np.isfinite(loss) & (x > 0)
    return x[usable], loss[usable]


def _is_unicode(encoding: str) -> bool:
    try:
        "⣿┤▲".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _dots(x: FloatArray, y: FloatArray, across: int, down: int) -> list[list[bool]]:
    """A raster of the curve: y runs from 0 at the top to 1 at the bottom."""
    raster = [[False] * across for _ in range(down)]
    span = x[-1] - x[0] or 1.0
    place = np.minimum(((x - x[0]) / span * across).astype(int), across - 1)
    centers = x[0] + (np.arange(across) + 0.5) / across * span
    between = np.interp(centers, x, y)
    previous = int(y[0] * (down - 1))
    last = int(place[-1]) + 1 if len(x) > 1 else 1
    for column in range(last):
        own = y[place == column]
        values = own if len(own) else between[column : column + 1]
        rows = [round(float(value) * (down - 1)) for value in (values.min(), values.max())]
        top, bottom = min(rows[0], previous + 1), max(rows[1], previous - 1)
        for row in range(max(0, top), min(down - 1, bottom) + 1):
            raster[row][column] = True
        previous = round(float(values[-1]) * (down - 1))
    return raster


def _braille(dots: Sequence[Sequence[bool]]) -> list[list[str]]:
    cells = []
    for top in range(0, len(dots), 4):
        line = []
        for left in range(0, len(dots[0]), 2):
            bits = sum(
                BRAILLE[row][column]
                for row in range(4)
                for column in range(2)
                if dots[top + row][left + column]
            )
            line.append(chr(0x2800 + bits) if bits else " ")
        cells.append(line)
    return cells


def _stars(dots: Sequence[Sequence[bool]]) -> list[list[str]]:
    return [["*" if dot else " " for dot in line] for line in dots]


def _mark(cells: list[list[str]], row: int | None, column: int | None, fine: bool) -> None:
    """Reference lines, behind the curve."""
    if row is not None and 0 <= row < len(cells):
        cells[row] = [("┄" if fine else "-") if cell == " " else cell for cell in cells[row]]
    for line in cells if column is not None else []:
        assert column is not None
        if line[column] in " ┄-":
            line[column] = "┊" if fine else ":"


def _position(value: float, start: float, end: float, count: int) -> int:
    """Which of ``count`` equal parts of [start, end] a value lies in."""
    share = (value - start) / (end - start) if end != start else 0.0
    return min(max(int(share * count), 0), count - 1)


def _with_axis(
    cells: Sequence[Sequence[str]], labels: dict[int, float], fine: bool
) -> list[str]:
    lines = []
    for number, line in enumerate(cells):
        value = labels.get(number)
        label = f"{value:5.2f} " if value is not None else " " * 6
        edge = ("┤" if value is not None else "│") if fine else "|"
        lines.append(f"{label}{edge}{''.join(line)}")
    return lines


def _x_axis(columns: int, first: float, last: float, name: str, fine: bool) -> list[str]:
    corner, line = ("└", "─") if fine else ("+", "-")
    text = lr_text if name == "LR" else short
    ends = f"{text(first)}{f'{name} {text(last)}':>{columns - len(text(first))}}"
    return [" " * 6 + corner + line * columns, " " * GUTTER + ends]


def _onset_line(columns: int, column: int, step: int, trace: Trace, fine: bool) -> str:
    mark = "▲" if fine else "^"
    lr = "" if is_held(trace) else f", Max LR {lr_text(float(trace.lr[step - 1]))}"
    text = f"onset at step {step}{lr}"
    if column + len(text) + 2 <= columns:
        return " " * (GUTTER + column) + f"{mark} {text}"
    return " " * GUTTER + f"{text + ' ' + mark:>{column + 1}}"

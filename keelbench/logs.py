"""Anybody's training log, CSV or JSON lines, as a trace that the detector can judge.

Written by hand, by pandas, by W&B or by TensorBoard: columns are found by their usual names,
rows are put in order, and whatever had to be repaired on the way is reported in plain words.
What cannot be read without guessing is refused.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keelbench.errors import KeelbenchError
from keelbench.log_table import Table, read_table
from keelbench.records import FloatArray, IntArray, Trace, Verdict, VerdictKind
from keelbench.registry import did_you_mean

ALIASES = {
    "step": "global_step trainer/global_step train/global_step train/step iteration iter "
    "update",
    "lr": "learning_rate learning-rate train/lr train/learning_rate optim/lr lr-adamw lr-adam",
    "loss": "train_loss train/loss training_loss train_loss_step loss/train lm_loss value",
    "probe": "probe_loss val_loss val/loss valid_loss validation_loss eval_loss eval/loss "
    "loss/val test_loss",
    "grad_norm": "gradient_norm grad-norm gradnorm train/grad_norm global_grad_norm "
    "train/global_grad_norm",
}
"""Per role, the names it goes by (any case, blanks as underscores), besides its own."""

LAST_RESORT = {"_step"}
"""W&B counts its own calls in ``_step``: the step only if nothing else is."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LogTrace:
    """A trace, and the step numbers that its rows have in the log."""

    trace: Trace
    steps: IntArray
    """Shape (rows,): the log's own step of each row of the trace, increasing."""
    notes: list[str]
    """What was repaired or assumed, one sentence each."""

    def in_log_steps(self, verdict: Verdict) -> Verdict:
        """The same verdict with the log's step numbers in place of row numbers.

        For people to read. ``records.max_lr_of`` wants the verdict as the detector gave it.
        """
        if verdict.kind is VerdictKind.FAILED:
            return dataclasses.replace(verdict, reason=f"non-finite at step {self.steps[0]}")
        if verdict.onset_step is None or verdict.detected_step is None:
            return verdict
        return dataclasses.replace(
            verdict,
            onset_step=int(self.steps[verdict.onset_step]),
            detected_step=int(self.steps[verdict.detected_step]),
        )


def read_log(
    path: Path,
    *,
    step: str = "step",
    lr: str = "lr",
    loss: str = "loss",
    probe: str = "probe",
    grad_norm: str = "grad_norm",
    slope: float | None = None,
    unigram_entropy: float | None = None,
) -> LogTrace:
    """Read one run's log.

    A name that is left at its default stands for any of its usual spellings
    (``ALIASES``); any other name must be in the file exactly as given.

    Args:
        path: CSV (also separated by semicolons or tabs) or JSON lines, told apart by content.
        step: column of step numbers; rows are numbered from 0 if there is none.
        lr: column of learning rates; gaps are interpolated.
        loss: column of train losses (nats per token). Its ``nan`` and ``inf`` count as
            measured; so do empty cells at the end of a log that had none before.
        probe: column of losses on a fixed held-out batch; empty and ``nan`` cells are rows at
            which it was not measured.
        grad_norm: column of gradient norms.
        slope: LR per step, in place of a column: LR = slope x (step + 1).
        unigram_entropy: nats; see ``Trace``.

    Raises:
        KeelbenchError: if the file cannot be read as one run's log.
    """
    for name, value in (("slope", slope), ("unigram_entropy", unigram_entropy)):
        if value is not None and not 0 < value < math.inf:
            raise KeelbenchError(f"{name} is {value}: it must be a positive number")
    wanted = {"step": step, "lr": lr, "loss": loss, "probe": probe, "grad_norm": grad_norm}
    table = read_table(Path(path), lambda column: _matters(column, wanted))
    chosen = {role: _choose(table, role, name) for role, name in wanted.items()}
    if chosen["loss"] is None:
        raise table.lacks("loss", "name it with loss=...")
    if chosen["lr"] is None and slope is None:
        raise table.lacks("lr", "name it with lr=..., or give slope=... (LR per step)")
    numbers = {role: table.numbers(name) for role, name in chosen.items() if name is not None}
    rows = _by_step(table, numbers)
    return _to_log_trace(table, rows, slope, unigram_entropy)


def _matters(column: str, wanted: dict[str, str]) -> bool:
    return any(_rank(column, role, name) is not None for role, name in wanted.items())


def _rank(column: str, role: str, name: str) -> int | None:
    """How well a column fits a role: 0 is best, None is not at all."""
    if column == name:
        return 0
    if name != role:
        return None
    plain = column.strip().lower().replace(" ", "_")
    tail = column.rpartition(" - ")[2].strip().lower().replace(" ", "_")  # W&B: "run - key"
    if plain == role:
        return 1
    if plain in ALIASES[role].split():
        return 2
    if tail == role or tail in ALIASES[role].split():
        return 3
    return 4 if role == "step" and tail in LAST_RESORT else None


def _choose(table: Table, role: str, name: str) -> str | None:
    """The one column for a role; None if the file has none and none was asked for."""
    ranks = {column: _rank(column, role, name) for column in table.cells}
    best = min((rank for rank in ranks.values() if rank is not None), default=None)
    fitting = [column for column, rank in ranks.items() if rank == best and rank is not None]
    if len(fitting) > 1:
        names = ", ".join(f"'{column}'" for column in fitting)
        raise KeelbenchError(
            f"{table.path}: several columns could be the {role}: {names}",
            f"name the one that is meant with {role}=...",
        )
    if not fitting and name != role:
        near = did_you_mean(name, table.names)
        raise table.lacks(name, f"names must match exactly{near}")
    return fitting[0] if fitting else None


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """One row per step, in order. Columns hold NaN, and ``has`` is False, where empty."""

    steps: IntArray
    columns: dict[str, FloatArray]
    has: dict[str, NDArray[np.bool_]]


def _by_step(table: Table, numbers: dict[str, tuple[IntArray, FloatArray]]) -> _Rows:
    """Sort, and merge rows of the same step: what was written last wins, column by column."""
    count = len(table.lines)
    step_of, known = np.arange(count), np.ones(count, dtype=bool)
    if "step" in numbers:
        step_of, known = _step_numbers(table, *numbers["step"])
    else:
        table.notes.append("no column of steps: rows are numbered from 0")
    if np.any(np.diff(step_of[known]) < 0):
        table.notes.append("rows were not in order of their steps: sorted")
    order = np.flatnonzero(known)
    order = order[np.argsort(step_of[order], kind="stable")]
    steps, starts = np.unique(step_of[order], return_index=True)
    columns, has = {}, {}
    conflicts = np.zeros(len(steps), dtype=bool)
    for role in numbers.keys() - {"step"}:
        rows, values = numbers[role]
        dense, present = np.full(count, np.nan), np.zeros(count, dtype=bool)
        dense[rows], present[rows] = values, True
        dense, present = dense[order], present[order]
        last = np.maximum.reduceat(np.where(present, np.arange(len(order)), -1), starts)
        has[role] = last >= 0
        columns[role] = np.where(has[role], dense[last], np.nan)
        group = np.repeat(np.arange(len(steps)), np.diff(np.append(starts, len(order))))
        kept = columns[role][group]
        differs = present & (dense != kept) & ~(np.isnan(dense) & np.isnan(kept))
        conflicts[group[differs]] = True
    if conflicts.any():
        again = steps[conflicts]
        table.notes.append(
            f"{len(again)} steps ({again[0]} to {again[-1]}) were logged more than once with "
            "different values: the last ones were used"
        )
    return _Rows(steps, columns, has)


def _step_numbers(
    table: Table, rows: IntArray, values: FloatArray
) -> tuple[IntArray, NDArray[np.bool_]]:
    bad = ~((values >= 0) & (values < 2**53) & (values == np.floor(values)))
    if bad.any():
        at = int(np.argmax(bad))
        raise KeelbenchError(
            f"{table.path}, line {table.lines[rows[at]]}: step is {values[at]:g}: it must be a "
            "whole number, 0 or more",
            "if the column counts something else, name the right one with step=...",
        )
    if not len(rows):
        raise KeelbenchError(f"{table.path}: the column of steps is empty")
    if len(rows) < len(table.lines):
        table.notes.append(f"{len(table.lines) - len(rows)} rows without a step: left out")
    known = np.zeros(len(table.lines), dtype=bool)
    steps = np.zeros(len(table.lines), dtype=np.int64)
    known[rows], steps[rows] = True, values.astype(np.int64)
    return steps, known


def _to_log_trace(
    table: Table, rows: _Rows, slope: float | None, unigram_entropy: float | None
) -> LogTrace:
    """Rows with a loss make the trace; probes of other rows move to the one before."""
    measured = _measured(table, rows)
    kept = np.flatnonzero(measured)
    if not len(kept):
        raise KeelbenchError(f"{table.path}: the column of losses is empty")
    steps = rows.steps[kept]
    norms = rows.columns.get("grad_norm")
    probe_rows, probe = _probes(table, rows, kept)
    trace = Trace(
        lr=_learning_rates(table, rows, steps, slope),
        loss=rows.columns["loss"][kept],
        grad_norm=None if norms is None or not rows.has["grad_norm"].any() else norms[kept],
        probe_step=probe_rows if len(probe) else None,
        probe=probe if len(probe) else None,
        unigram_entropy=unigram_entropy,
    )
    return LogTrace(trace=trace, steps=steps, notes=table.notes)


def _measured(table: Table, rows: _Rows) -> NDArray[np.bool_]:
    """Which rows have a loss; a log that goes on without losses is taken to have lost it.

    pandas and JSON write a NaN as nothing at all. A loss that is logged every k steps leaves
    gaps too, but none longer at the end than before. Rows of another kind do not count: those
    with a probe, or without an LR where there is a column of LRs.
    """
    measured = rows.has["loss"].copy()
    if not measured.any() or measured[-1]:
        return measured
    last = int(np.flatnonzero(measured)[-1])
    silent = np.zeros(len(measured), dtype=bool)
    silent[last + 1 :] = True
    if "lr" in rows.has:
        silent &= rows.has["lr"]
    if "probe" in rows.has:
        silent &= ~rows.has["probe"]
    longest = int(np.max(np.diff(np.flatnonzero(measured)), initial=1))
    if silent.sum() >= longest:
        first = rows.steps[silent][0]
        table.notes.append(f"loss is empty from step {first} to the end: read as not finite")
        measured |= silent
    return measured


def _probes(table: Table, rows: _Rows, kept: IntArray) -> tuple[IntArray, FloatArray]:
    """Row of the trace and value of each probe; the last one where two fall on one row."""
    column = rows.columns.get("probe", np.empty(0))
    at = np.flatnonzero(~np.isnan(column))
    target = np.maximum(np.searchsorted(kept, at, side="right") - 1, 0)
    moved = int(np.count_nonzero(kept[target] != at))
    if moved:
        table.notes.append(f"{moved} probes without a loss of their own: put to the row before")
    unique, from_end = np.unique(target[::-1], return_index=True)
    return unique, column[at[::-1][from_end]]


def _learning_rates(
    table: Table, rows: _Rows, steps: IntArray, slope: float | None
) -> FloatArray:
    if slope is not None:
        return np.asarray(slope * (steps + 1.0), dtype=np.float64)
    lr = rows.columns["lr"]
    known = ~np.isnan(lr)
    if not known.any():
        raise KeelbenchError(
            f"{table.path}: the column of learning rates is empty",
            "give slope=... (LR per step) instead",
        )
    wrong = known & ~((lr >= 0) & (lr < math.inf))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise KeelbenchError(
            f"{table.path}: LR at step {rows.steps[at]} is {lr[at]:g}: it must be finite and "
            "not negative"
        )
    if not np.isin(steps, rows.steps[known]).all():
        table.notes.append("LR is missing at some steps: interpolated")
    filled = np.interp(steps, rows.steps[known], lr[known])
    if np.any(np.diff(filled) < 0):
        table.notes.append("LR is not rising throughout: this is not a pure ramp")
    return filled

"""A lane as a baseline keeps it and the gate compares it: a record without its curves."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from keelbench.records import FloatArray, Record, Rule, VerdictKind
from keelbench.specs import CellSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lane:
    """The outcome of one seed in one cell."""

    seed: int
    verdict: VerdictKind
    rule: Rule | None = None
    onset_step: int | None = None
    max_lr: float | None = None
    lower_bound: float | None = None
    """Peak LR that a surviving lane reached; None if it did not survive."""
    steps: int = 0
    """Steps that were run."""
    reason: str | None = None
    sha256: str = ""
    """Of the losses as little-endian float64: equal if and only if they are bit for bit, but
    that any NaN is like any other."""
    losses: FloatArray | None = None
    """Train loss per step, or None where only the checksum is kept."""

    @classmethod
    def from_record(cls, record: Record, *, keep_losses: bool = True) -> Self:
        losses = np.array(record.trace.loss, dtype="<f8")
        losses[np.isnan(losses)] = np.nan  # text keeps no sign or payload of a NaN
        return cls(
            seed=record.seed,
            verdict=record.verdict.kind,
            rule=record.verdict.rule,
            onset_step=record.verdict.onset_step,
            max_lr=record.max_lr,
            lower_bound=record.lower_bound if record.max_lr is None else None,
            steps=record.trace.steps,
            reason=record.verdict.reason,
            sha256=hashlib.sha256(losses.tobytes()).hexdigest(),
            losses=losses if keep_losses else None,
        )

    @property
    def restricted(self) -> float | None:
        """Max LR as far as the ramp could see it: min(Max LR, peak); None if there is none."""
        return self.max_lr if self.max_lr is not None else self.lower_bound

    @property
    def is_censored(self) -> bool:
        return self.max_lr is None and self.lower_bound is not None

    @property
    def was_carried_out(self) -> bool:
        """False if the run itself failed (out of memory, a crash), so nothing was measured."""
        return self.verdict is not VerdictKind.FAILED or self.steps > 0

    @property
    def outcome(self) -> str:
        """For people: ``0.0384``, ``>= 0.05``, ``never learned``, ``diverged at once``."""
        if self.max_lr is not None:
            return f"{self.max_lr:.4g}"
        if self.lower_bound is not None:
            return f">= {self.lower_bound:.4g}"
        if self.verdict is VerdictKind.DIVERGED:
            return "diverged at once"
        return self.verdict.value.replace("_", " ")

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the losses as one line of text, each digit kept."""
        losses = None if self.losses is None else " ".join(map(repr, self.losses.tolist()))
        return {
            "seed": self.seed,
            "verdict": self.verdict.value,
            "rule": self.rule and self.rule.value,
            "onset_step": self.onset_step,
            "max_lr": self.max_lr,
            "lower_bound": self.lower_bound,
            "steps": self.steps,
            "reason": self.reason,
            "sha256": self.sha256,
            "losses": losses,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        rule, text = values["rule"], values["losses"]
        losses = None if text is None else np.array([float(word) for word in text.split()])
        return cls(
            seed=values["seed"],
            verdict=VerdictKind(values["verdict"]),
            rule=Rule(rule) if rule else None,
            onset_step=values["onset_step"],
            max_lr=_positive("max_lr", values["max_lr"]),
            lower_bound=_positive("lower_bound", values["lower_bound"]),
            steps=values["steps"],
            reason=values["reason"],
            sha256=values["sha256"],
            losses=losses,
        )


def _positive(name: str, value: Any) -> float | None:
    """A hand-edited number must not pass for a Max LR."""
    if value is None or (isinstance(value, int | float) and 0 < value < float("inf")):
        return value
    raise ValueError(f"{name} is {value!r}: it must be a positive number or null")


def lanes_of(
    records: Sequence[Record], *, keep_losses: bool = True
) -> list[tuple[CellSpec, dict[int, Lane]]]:
    """Records grouped into cells, in the order of their first appearance, lanes by seed.

    Of two records of one cell and seed the later one counts.
    """
    cells: dict[str, tuple[CellSpec, dict[int, Lane]]] = {}
    for record in by_time(records):
        _, lanes = cells.setdefault(record.cell.hash, (record.cell.resolved(), {}))
        lanes[record.seed] = Lane.from_record(record, keep_losses=keep_losses)
    order = list(dict.fromkeys(record.cell.hash for record in records))
    return [cells[key] for key in order]


def by_time(records: Iterable[Record]) -> list[Record]:
    """Oldest first; records without a time keep their order."""
    return sorted(records, key=lambda record: record.created)

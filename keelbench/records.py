"""What came out: frozen, passive results with units in their names.

Everything downstream of a run (store, tables, plots, gate) reads only these.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from keelbench.errors import KeelbenchError
from keelbench.parsing import content_hash
from keelbench.specs import PAPER_WIDTH, CellSpec

RECORD_SCHEMA = "keelbench.record/1"

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class VerdictKind(StrEnum):
    """How a ramp ended."""

    DIVERGED = "diverged"
    """A rule fired: Max LR is the LR of the last step before the onset."""
    SURVIVED = "survived"
    """Censored: the ramp reached its peak in good health, so Max LR >= peak."""
    NEVER_LEARNED = "never_learned"
    """The loss never left its initial level: there is no Max LR."""
    FAILED = "failed"
    """The run could not be carried out, or was non-finite at the first step."""


class Rule(StrEnum):
    """Which of the detector's rules fired; the paper's three patterns and non-finite."""

    NON_FINITE = "non-finite"
    INSTABILITY = "irrecoverable instability"
    STAGNATION = "stagnation"
    DEGRADATION = "degradation"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """Everything measured during one ramp.

    ``lr``, ``loss``, ``grad_norm``: one value per step, shape (steps,). The LR is the one
    applied at that step, the loss is the train loss (nats per token) of the weights before
    that step's update, the gradient norm is the global norm before clipping.
    ``probe_step``, ``probe``: shape (probes,); the loss (nats per token) on the fixed
    held-out batch with the weights before the update of step ``probe_step``.
    """

    lr: FloatArray
    loss: FloatArray
    grad_norm: FloatArray | None = None
    probe_step: IntArray | None = None
    probe: FloatArray | None = None
    unigram_entropy: float | None = None
    """Cross-entropy (nats) of the probe batch under the corpus's unigram distribution: the
    level of a model that has learned nothing from context. None if unknown."""

    @property
    def steps(self) -> int:
        return len(self.loss)

    def to_dict(self) -> dict[str, Any]:
        return {
            "lr": _floats_out(self.lr),
            "loss": _floats_out(self.loss),
            "grad_norm": _floats_out(self.grad_norm),
            "probe_step": None if self.probe_step is None else self.probe_step.tolist(),
            "probe": _floats_out(self.probe),
            "unigram_entropy": self.unigram_entropy,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        steps = values["probe_step"]
        return cls(
            lr=np.asarray(values["lr"], dtype=np.float64),
            loss=np.asarray(values["loss"], dtype=np.float64),
            grad_norm=_floats_in(values["grad_norm"]),
            probe_step=None if steps is None else np.asarray(steps, dtype=np.int64),
            probe=_floats_in(values["probe"]),
            unigram_entropy=values["unigram_entropy"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The detector's answer for one trace."""

    kind: VerdictKind
    rule: Rule | None = None
    """The rule that fired; None unless diverged."""
    onset_step: int | None = None
    """Step at which the excursion starts (backdated); None unless diverged."""
    detected_step: int | None = None
    """Step at which the rule could first tell; None unless diverged."""
    reason: str | None = None
    """One sentence for people: why failed, why never learned, what was not checked."""
    open_step: int | None = None
    """Of a survivor whose loss had left its best level when the trace ended, too late to tell
    whether for good: the first step of that. What comes after is not claimed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Where a run took place: anything that may explain a difference."""

    keelbench: str = ""
    torch: str = ""
    python: str = ""
    platform: str = ""
    device_name: str = ""
    threads: int = 1
    detector: str = ""
    deterministic: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    """Compile, graph capture, attention backend and the like, as found at run time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Record:
    """The stored result of one lane."""

    cell: CellSpec
    seed: int
    detector: str
    """Version of the detector whose verdict this is."""
    verdict: Verdict
    max_lr: float | None
    """LR of the last step before the onset; None unless diverged (or held, see docs)."""
    trace: Trace
    seconds: float
    environment: Environment
    created: str = ""
    """UTC time at which the lane ended, ISO 8601."""
    diagnosis: dict[str, Any] | None = None
    """Protocol-specific extras: hold trials, refined ramps, first site to move."""

    @property
    def id(self) -> str:
        return record_id(self.cell, self.seed, self.detector)

    @property
    def is_censored(self) -> bool:
        """True if the ramp ended healthy, so that only a lower bound is known."""
        return self.verdict.kind is VerdictKind.SURVIVED

    @property
    def lower_bound(self) -> float | None:
        """The last LR at which a surviving lane was healthy: the peak, unless its loss had
        left its best level by then; None for all other lanes."""
        if not self.is_censored or not self.trace.steps:
            return None
        end = self.verdict.open_step or self.trace.steps
        return float(self.trace.lr[end - 1])

    @property
    def normalized_max_lr(self) -> float | None:
        """Max LR x width / 1024."""
        if self.max_lr is None:
            return None
        return self.max_lr * self.cell.model.width / PAPER_WIDTH

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": RECORD_SCHEMA,
            "id": self.id,
            "cell": self.cell.resolved().to_dict(),
            "seed": self.seed,
            "detector": self.detector,
            "verdict": dataclasses.asdict(self.verdict),
            "max_lr": self.max_lr,
            "seconds": self.seconds,
            "created": self.created,
            "environment": dataclasses.asdict(self.environment),
            "diagnosis": self.diagnosis,
            "trace": self.trace.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read one stored record.

        Raises:
            KeelbenchError: if the schema is newer than this version can read.
        """
        schema = values.get("schema")
        if schema != RECORD_SCHEMA:
            raise KeelbenchError(
                f"record schema is {schema!r}, this version reads {RECORD_SCHEMA!r}",
                "upgrade keelbench to read newer records",
            )
        verdict = dict(values["verdict"])
        verdict["kind"] = VerdictKind(verdict["kind"])
        verdict["rule"] = Rule(verdict["rule"]) if verdict["rule"] else None
        return cls(
            cell=CellSpec.from_dict(values["cell"]),
            seed=values["seed"],
            detector=values["detector"],
            verdict=Verdict(**verdict),
            max_lr=values["max_lr"],
            trace=Trace.from_dict(values["trace"]),
            seconds=values["seconds"],
            environment=Environment(**values["environment"]),
            created=values["created"],
            diagnosis=values["diagnosis"],
        )


def record_id(cell: CellSpec, seed: int, detector: str) -> str:
    """Hash of everything that can change the number: resolved cell, seed, detector."""
    return content_hash({"cell": cell.resolved().to_dict(), "seed": seed, "detector": detector})


def max_lr_of(trace: Trace, verdict: Verdict) -> float | None:
    """LR of the last step before the onset of divergence; None where there is no value.

    An onset at step 0 means that not even the first step's LR was tolerated: no value.
    """
    if verdict.kind is not VerdictKind.DIVERGED or not verdict.onset_step:
        return None
    return float(trace.lr[verdict.onset_step - 1])


def _floats_out(values: FloatArray | None) -> list[float | str] | None:
    """JSON has no NaN or infinity: they travel as the strings 'nan', 'inf', '-inf'."""
    if values is None:
        return None
    return [value if math.isfinite(value) else str(value) for value in values.tolist()]


def _floats_in(values: list[float | str] | None) -> FloatArray | None:
    return None if values is None else np.asarray(values, dtype=np.float64)

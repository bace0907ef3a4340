"""Synthetic lanes for the tests of the gate: Max LR is dealt, not measured."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from keelbench.gate import Baseline, build_baseline
from keelbench.records import Environment, Record, Rule, Trace, Verdict, VerdictKind
from keelbench.specs import CellSpec, ModelSpec

DETECTOR = "7"
ENVIRONMENT = Environment(
    keelbench="0.1.0",
    torch="2.13.0",
    python="3.11.2",
    platform="Linux-x86_64",
    device_name="a processor",
    detector=DETECTOR,
)
ARCHS = ("keel", "pre_ln", "post_ln", "mix_ln", "deepnorm", "hybridnorm")
TYPICAL = 0.03
"""A Max LR some 190 steps up the ramp of width 64: one step is 0.5 % of it."""


def cell(arch: str = "keel", **overrides: object) -> CellSpec:
    """A resolved cell; overrides by short or dotted name."""
    base = CellSpec(model=ModelSpec(arch=arch, depth=16, width=64))
    return base.replaced(dict(overrides)).resolved()


def lane(
    spec: CellSpec,
    seed: int,
    max_lr: float | None = None,
    kind: VerdictKind = VerdictKind.DIVERGED,
    losses: Sequence[float] | None = None,
) -> Record:
    """One lane with this Max LR, or with a verdict that has none."""
    peak = spec.ramp.peak
    if losses is None:
        losses = (5.0, 4.0 + seed, max_lr or peak, 0.1)
    trace = Trace(lr=np.linspace(1e-4, peak, len(losses)), loss=np.array(losses))
    onset = None if kind is not VerdictKind.DIVERGED else 3 if max_lr else 0
    return Record(
        cell=spec,
        seed=seed,
        detector=DETECTOR,
        verdict=Verdict(
            kind=kind,
            rule=Rule.INSTABILITY if kind is VerdictKind.DIVERGED else None,
            onset_step=onset,
            reason=None if kind is VerdictKind.DIVERGED else "as dealt by the test",
        ),
        max_lr=max_lr,
        trace=trace,
        seconds=1.0,
        environment=ENVIRONMENT,
        created=f"2026-11-29T12:00:{seed:02d}Z",
    )


def not_carried_out(spec: CellSpec, seed: int) -> Record:
    """What the scheduler stores for a lane that never ran: no steps, no environment."""
    record = lane(spec, seed, kind=VerdictKind.FAILED)
    empty = np.empty(0)
    return dataclasses.replace(
        record,
        verdict=Verdict(kind=VerdictKind.FAILED, reason="out of memory"),
        trace=Trace(lr=empty, loss=empty),
        environment=Environment(),
    )


def lanes(spec: CellSpec, values: Sequence[float]) -> list[Record]:
    """One lane per value, seeds from 0."""
    return [lane(spec, seed, value) for seed, value in enumerate(values)]


def deal(
    rng: np.random.Generator, archs: Sequence[str] = ARCHS, seeds: int = 5, spread: float = 0.1
) -> dict[str, np.ndarray]:
    """Max LR per architecture and seed, as of a baseline."""
    return {arch: TYPICAL * np.exp(rng.normal(0, spread, seeds)) for arch in archs}


def noisy(
    rng: np.random.Generator,
    values: dict[str, np.ndarray],
    sd: float,
    ratio: dict[str, float] | float = 1.0,
) -> list[Record]:
    """The same lanes run again: per-seed noise, and a true ratio where one is given."""
    factor = ratio if isinstance(ratio, dict) else dict.fromkeys(values, ratio)
    return [
        record
        for arch, old in values.items()
        for record in lanes(
            cell(arch), old * factor.get(arch, 1.0) * np.exp(rng.normal(0, sd, len(old)))
        )
    ]


def agreed(values: dict[str, np.ndarray], name: str = "ci") -> Baseline:
    """A baseline with these values."""
    return build_baseline(
        name, [record for arch, old in values.items() for record in lanes(cell(arch), old)]
    )

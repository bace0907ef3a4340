"""Synthetic records for tests of everything downstream of the store: no torch, no compute.

Shapes come from formulas that imitate real ramps (see tests/traces), or from those traces.
"""

import dataclasses
import itertools
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from keelbench.records import (
    Environment,
    FloatArray,
    IntArray,
    Record,
    Rule,
    Trace,
    Verdict,
    VerdictKind,
    max_lr_of,
)
from keelbench.specs import CellSpec, ModelSpec

TRACES = Path(__file__).parent / "traces"
UNIGRAM = 3.11
DETECTOR = "1"
ENVIRONMENT = Environment(
    keelbench="0.1.0",
    torch="2.13.0",
    python="3.11.2",
    platform="Linux x86_64",
    device_name="2 cores",
    detector=DETECTOR,
    extra={"compiled": False},
)

ONSETS = {
    ("post_ln", 64): 21,
    ("hybridnorm", 64): 22,
    ("mix_ln", 64): 78,
    ("deepnorm", 64): 96,
    ("pre_ln", 64): 340,
    ("keel", 64): 300,
    ("post_ln", 512): 20,
    ("hybridnorm", 512): 22,
    ("mix_ln", 512): 24,
    ("deepnorm", 512): 25,
    ("pre_ln", 512): 230,
    ("keel", 512): 150,
}
"""Onset steps of tests' six architectures, near those of the real study."""

SPREAD = (1.0, 1.06, 0.93, 1.03, 0.96)
"""Factors on the onset, dealt to seeds."""


def cell(arch: str = "keel", depth: int = 64, width: int = 64, **overrides: Any) -> CellSpec:
    """A resolved cell; overrides are dotted names with ``__`` for the dot."""
    base = CellSpec(model=ModelSpec(arch=arch, depth=depth, width=width))
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return (base.replaced(dotted) if dotted else base).resolved()


def trace(
    steps: int,
    onset: int | None,
    *,
    slope: float = 1.6e-4,
    seed: int = 0,
    floor: float = 2.2,
    after: float = UNIGRAM,
    rise: float = 6.0,
    probe_every: int = 4,
) -> Trace:
    """A loss that falls from 5 to ``floor`` and leaves for ``after`` at the onset."""
    rng = np.random.default_rng(seed)
    step = np.arange(steps)
    clean = floor + (5.0 - floor) * np.exp(-step / 14.0)
    if onset is not None:
        left = 1.0 / (1.0 + np.exp(-(np.clip((step - onset) / rise, -30, 30) - 2.0)))
        clean = clean + (after - clean) * left
    probe_step = np.arange(0, steps, probe_every)
    probe = clean[probe_step] + rng.normal(0, 0.015, len(probe_step))
    return Trace(
        lr=slope * (step + 1.0),
        loss=clean + rng.normal(0, 0.1, steps),
        grad_norm=np.exp(rng.normal(0.6, 0.25, steps)) * (1.0 + 4.0 * np.exp(-step / 8.0)),
        probe_step=probe_step,
        probe=probe,
        unigram_entropy=UNIGRAM,
    )


def record(
    arch: str = "keel",
    depth: int = 64,
    seed: int = 0,
    *,
    kind: VerdictKind = VerdictKind.DIVERGED,
    rule: Rule | None = None,
    onset: int | None = None,
    width: int = 64,
    detector: str = DETECTOR,
    **overrides: Any,
) -> Record:
    """One lane with a trace that fits its verdict."""
    spec = cell(arch, depth, width, **overrides)
    assert spec.ramp.slope is not None
    if kind is not VerdictKind.DIVERGED:
        return _without_onset(spec, seed, kind, detector)
    base = ONSETS.get((arch, depth), 120)
    spread = SPREAD[zlib.crc32(f"{arch} {depth} {seed}".encode()) % len(SPREAD)]
    onset = onset if onset is not None else round(base * spread)
    stuck = onset < 30
    rule = rule or (Rule.STAGNATION if stuck else Rule.INSTABILITY)
    lane = trace(
        onset + 60,
        onset,
        slope=spec.ramp.slope,
        seed=zlib.crc32(f"{arch} {depth} {seed}".encode()),
        floor=3.0 if stuck else 2.2,
    )
    verdict = Verdict(
        kind=kind, rule=rule, onset_step=onset, detected_step=onset + 40, reason=None
    )
    return Record(
        cell=spec,
        seed=seed,
        detector=detector,
        verdict=verdict,
        max_lr=max_lr_of(lane, verdict),
        trace=lane,
        seconds=lane.steps * 0.13,
        environment=dataclasses.replace(ENVIRONMENT, detector=detector),
        created=f"2026-11-29T12:{seed:02d}:00Z",
    )


def _without_onset(spec: CellSpec, seed: int, kind: VerdictKind, detector: str) -> Record:
    assert spec.ramp.slope is not None
    lane = trace(400, None, slope=spec.ramp.slope, seed=seed)
    reason = None
    if kind is VerdictKind.NEVER_LEARNED:
        flat = np.full(400, 4.85)
        lane = dataclasses.replace(lane, loss=flat, probe=flat[::4])
        reason = "the probe never fell below its first value"
    if kind is VerdictKind.FAILED:
        lane = Trace(lr=np.array([spec.ramp.slope]), loss=np.array([np.nan]))
        reason = "the loss is not finite at the first step"
    return Record(
        cell=spec,
        seed=seed,
        detector=detector,
        verdict=Verdict(kind=kind, reason=reason),
        max_lr=None,
        trace=lane,
        seconds=lane.steps * 0.13,
        environment=ENVIRONMENT,
        created=f"2026-11-29T12:{seed:02d}:00Z",
    )


def study(
    archs: tuple[str, ...] = (
        "post_ln",
        "deepnorm",
        "hybridnorm",
        "mix_ln",
        "pre_ln",
        "keel",
    ),
    depths: tuple[int, ...] = (64, 512),
    seeds: int = 3,
    **overrides: Any,
) -> list[Record]:
    """A healthy comparison: every lane diverged."""
    return [
        record(arch, depth, seed, **overrides)
        for arch, depth, seed in itertools.product(archs, depths, range(seeds))
    ]


def mixed() -> list[Record]:
    """Every kind of verdict, and a cell in which some lanes survived."""
    survived, never = VerdictKind.SURVIVED, VerdictKind.NEVER_LEARNED
    return [
        *study(archs=("post_ln", "pre_ln"), depths=(64,)),
        record("keel", 64, 0),
        record("keel", 64, 1, kind=survived),
        record("keel", 64, 2, kind=survived),
        *(record("deepnorm", 64, seed, kind=survived) for seed in range(3)),
        *(record("mix_ln", 64, seed, kind=never) for seed in range(3)),
        record("hybridnorm", 64, 0, kind=VerdictKind.FAILED),
    ]


def from_csv(name: str) -> Record:
    """A real lane from tests/traces, with the middle of its expected onset range."""
    rows = (TRACES / name).read_text().splitlines()[1:]
    fields = [row.split(",") for row in rows]
    step = np.array([int(row[0]) for row in fields])
    probed = [row for row in fields if row[4]]
    expected = json.loads((TRACES / "expected.json").read_text())[name]
    lane = Trace(
        lr=_floats(row[1] for row in fields),
        loss=_floats(row[2] for row in fields),
        grad_norm=_floats(row[3] for row in fields),
        probe_step=_steps(row[0] for row in probed),
        probe=_floats(row[4] for row in probed),
        unigram_entropy=UNIGRAM,
    )
    verdict = Verdict(
        kind=VerdictKind.DIVERGED,
        rule=Rule(expected.get("rule", "stagnation")),
        onset_step=sum(expected["onset"]) // 2,
        detected_step=int(step[-1]),
    )
    arch, seed = name.split("_L64")[0], int(name[-5])
    return Record(
        cell=cell(arch),
        seed=seed,
        detector=DETECTOR,
        verdict=verdict,
        max_lr=max_lr_of(lane, verdict),
        trace=lane,
        seconds=lane.steps * 0.13,
        environment=ENVIRONMENT,
        created="2026-11-29T12:00:00Z",
    )


def real() -> list[Record]:
    """The twelve real lanes: six architectures, two seeds, depth 64, width 64."""
    return [from_csv(path.name) for path in sorted(TRACES.glob("*_w64_*.csv"))]


def awkward() -> dict[str, list[Record]]:
    """Named inputs that break careless tables and figures."""
    lonely = record("keel", 64, 0)
    nan = np.full(20, np.nan)
    not_finite = Trace(lr=np.arange(1.0, 21.0) * 1e-3, loss=nan, grad_norm=nan)
    exploded = trace(80, 40, after=1e4, rise=1.0)
    return {
        "one lane": [lonely],
        "two lanes": study(archs=("keel",), depths=(64,), seeds=2),
        "one step": [_with_trace(lonely, Trace(lr=np.array([1e-4]), loss=np.array([5.0])))],
        "no steps": [_with_trace(lonely, Trace(lr=np.array([]), loss=np.array([])))],
        "all censored": [record("keel", 64, s, kind=VerdictKind.SURVIVED) for s in range(3)],
        "never learned": [record(seed=s, kind=VerdictKind.NEVER_LEARNED) for s in range(3)],
        "failed": [record("keel", 64, 0, kind=VerdictKind.FAILED)],
        "all NaN": [_with_trace(lonely, not_finite)],
        "loss of 1e4": [_with_trace(lonely, exploded)],
        "infinite loss": [
            _with_trace(
                lonely,
                dataclasses.replace(exploded, loss=np.where(exploded.loss > 100, np.inf, 3.0)),
            )
        ],
        "identical seeds": [record("keel", 64, s, onset=200) for s in range(3)],
        "mixed": mixed(),
        "two widths": [
            *study(("keel", "pre_ln", "post_ln"), (64,), 2),
            *study(("keel", "pre_ln", "post_ln"), (64,), 2, width=256),
        ],
        "other rules": [
            record(arch, 64, seed)
            for arch in ("keel(alpha=16)", "keel(alpha=64)", "my_rules:Sandwich", "resi_dual")
            for seed in range(3)
        ],
    }


def _with_trace(base: Record, lane: Trace) -> Record:
    verdict = base.verdict
    if lane.steps <= (verdict.onset_step or 0):
        verdict = Verdict(kind=VerdictKind.FAILED, reason="too few steps to judge")
    return dataclasses.replace(
        base, trace=lane, verdict=verdict, max_lr=max_lr_of(lane, verdict)
    )


def _floats(values: Any) -> FloatArray:
    return np.array([float(value) for value in values])


def _steps(values: Any) -> IntArray:
    return np.array([int(value) for value in values])

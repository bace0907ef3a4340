"""How often the gate cries wolf, and how often it sees a drop: simulated gates.

    python benchmarks/gate_power.py             # the tables of docs/ci.md, about a minute
    python benchmarks/gate_power.py --gates 2000

Each simulated gate draws per-seed log-ratios of Max LR for its cells and takes the decision
with the code of ``keelbench check`` (keelbench.gate.judge), look by look.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keelbench.gate.judge import Sample, judge
from keelbench.gate.sequential import Look, plan
from keelbench.gate.trial import DEFAULT_MARGIN, log_margin

DROP = 0.25
"""The true drop that the gate must see."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Cells of one gate: the spread of their per-seed log-ratios and their true change."""

    spread: np.ndarray
    effect: np.ndarray
    """True mean log-ratio of each cell."""
    tails: float = np.inf
    """Degrees of freedom of the noise: infinite is normal, 4 is heavy-tailed."""
    calibration_df: int = 0
    """Degrees of freedom of the calibration in the baseline: repeats x seeds; 0 without."""
    calibrated_share: float = 1.0
    """Calibrated over true standard deviation: below 1, this machine is noisier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Verdicts of all simulated gates; arrays of shape (gates, cells)."""

    regressed: np.ndarray
    passed: np.ndarray
    inconclusive: np.ndarray
    seeds: np.ndarray


def simulate(
    scenario: Scenario,
    *,
    gates: int,
    looks: Sequence[Look],
    margin: float = DEFAULT_MARGIN,
    quantum: float = 0.005,
    seed: int = 0,
) -> Outcome:
    """Run many gates on simulated lanes."""
    rng = np.random.default_rng(seed)
    shape = (gates, len(scenario.spread), looks[-1].seeds)
    noise = rng.standard_normal(shape)
    if np.isfinite(scenario.tails):
        noise = rng.standard_t(scenario.tails, shape) / np.sqrt(
            scenario.tails / (scenario.tails - 2)
        )
    d = scenario.effect[:, None] + noise * scenario.spread[:, None]
    df = scenario.calibration_df
    known = np.sqrt(rng.chisquare(df, shape[:2]) / df) if df else np.zeros(shape[:2])
    noise_sd = scenario.calibrated_share * scenario.spread * known
    return replay(d, looks, log_margin(margin, quantum), quantum, noise_sd, df)


def replay(
    d: np.ndarray,
    looks: Sequence[Look],
    delta: float,
    quantum: float,
    noise_sd: np.ndarray | float = 0.0,
    noise_df: int = 0,
) -> Outcome:
    """The looks of ``keelbench.gate.decision``; ``d`` has the shape (gates, cells, seeds)."""
    cells = d.shape[:2]
    n, mean, sd = np.zeros(cells, np.int64), np.zeros(cells), np.zeros(cells)
    regressed, passed, open_ = (
        np.zeros(cells, bool),
        np.zeros(cells, bool),
        np.ones(cells, bool),
    )
    inconclusive = np.zeros(cells, bool)
    for look in looks:
        x = d[..., : look.seeds]
        n = np.where(open_, look.seeds, n)
        mean = np.where(open_, x.mean(-1), mean)
        sd = np.where(open_, x.std(-1, ddof=1), sd)
        sample = Sample(
            n=n,
            mean=mean,
            sd=sd,
            quantum=np.full(cells, quantum),
            delta=np.full(cells, delta),
            noise_sd=np.broadcast_to(noise_sd, cells),
            noise_df=np.full(cells, noise_df),
        )
        found = judge(sample, look, open_)
        regressed |= found.regressed
        passed |= found.passed
        settled = found.regressed | found.improved | found.passed | found.no_drop
        if look is looks[-1]:
            inconclusive = open_ & ~settled & ~found.no_evidence
        open_ = open_ & ~settled
    return Outcome(regressed=regressed, passed=passed, inconclusive=inconclusive, seeds=n)


SPREADS = {
    "all 0.02": lambda cells: np.full(cells, 0.02),
    "all 0.05": lambda cells: np.full(cells, 0.05),
    "all 0.07": lambda cells: np.full(cells, 0.07),
    "all 0.10": lambda cells: np.full(cells, 0.10),
    "all 0.20": lambda cells: np.full(cells, 0.20),
    "0.02 to 0.45": lambda cells: np.geomspace(0.02, 0.45, cells)[::-1],
}
"""Standard deviations of the per-seed ln-ratio; the last cell is the one that drops."""


def row(cells: int, name: str, looks: Sequence[Look], gates: int, df: int) -> str:
    """One line of a table: false alarms and power of gates of one kind."""
    spread = SPREADS[name](cells)
    effects = {
        "same": np.zeros(cells),
        "drop": np.r_[np.zeros(cells - 1), np.log(1 - DROP)],
        "edge": np.full(cells, np.log(1 - DEFAULT_MARGIN)),
    }
    found = {
        key: simulate(
            Scenario(spread=spread, effect=effect, calibration_df=df), gates=gates, looks=looks
        )
        for key, effect in effects.items()
    }
    heavy = simulate(
        Scenario(spread=spread, effect=effects["same"], calibration_df=df, tails=4),
        gates=gates,
        looks=looks,
    )
    noisier = simulate(
        Scenario(
            spread=spread, effect=effects["same"], calibration_df=df, calibrated_share=0.5
        ),
        gates=gates,
        looks=looks,
    )
    same = found["same"]
    alarms = [x.regressed.any(axis=1).mean() for x in (same, heavy, noisier)]
    return (
        f"| {cells} | {name} | {' | '.join(f'{x:.2%}' for x in alarms)} "
        f"| {found['drop'].regressed[:, -1].mean():.1%} "
        f"| {found['edge'].regressed.mean():.1%} "
        f"| {same.passed.mean():.0%} | {same.inconclusive.mean():.0%} "
        f"| {same.seeds.mean():.1f} |"
    )


HEAD = (
    "| cells | sd | false alarm | heavy tails | noise 2 x calibrated | drop of 25 % seen "
    "| drop of 10 % called one | pass | inconclusive | seeds |\n" + "|---" * 10 + "|"
)


def main() -> None:
    """Print the tables of docs/ci.md."""
    parser = argparse.ArgumentParser(description="false alarms and power of keelbench check")
    parser.add_argument("--gates", type=int, default=20_000, help="simulated gates per row")
    gates = parser.parse_args().gates
    for looks, df in ((plan(3, 5), 10), (plan(3, 5), 0), (plan(3, 8), 16), (plan(3, 12), 24)):
        seeds = ", ".join(str(look.seeds) for look in looks)
        kind = f"calibrated with {df} degrees of freedom" if df else "not calibrated"
        print(f"\nLooks at {seeds} seeds, {kind}, {gates} gates per row:\n\n{HEAD}")
        for cells in (1, 3, 6, 12):
            for name in SPREADS:
                print(row(cells, name, looks, gates, df), flush=True)


if __name__ == "__main__":
    main()

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

from keelbench.gate.decision import DEFAULT_MARGIN, log_margin
from keelbench.gate.judge import Sample, judge
from keelbench.gate.sequential import Look, plan

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
    return replay(d, looks, log_margin(margin, quantum), quantum)


def replay(d: np.ndarray, looks: Sequence[Look], delta: float, quantum: float) -> Outcome:
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
    "0.02 to 0.12": lambda cells: np.geomspace(0.02, 0.12, cells),
    "0.12, rest 0": lambda cells: np.r_[np.full(cells - 1, 1e-4), 0.12],
}


def table(looks: Sequence[Look], gates: int) -> list[str]:
    """Markdown rows, one per number of cells and spread; it is the last cell that drops."""
    lines = [
        "| cells | sd of ln-ratio | false alarm per gate | heavy tails | unchanged cells: "
        "pass | inconclusive | seeds | drop of 25 % seen | drop of 10 % (= margin) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cells in (1, 3, 6, 12):
        for name, spread_of in SPREADS.items():
            spread, zero = spread_of(cells), np.zeros(cells)
            one = np.r_[zero[1:], np.log(1 - DROP)]
            edge = np.full(cells, np.log(1 - DEFAULT_MARGIN))
            same = simulate(Scenario(spread=spread, effect=zero), gates=gates, looks=looks)
            heavy = Scenario(spread=spread, effect=zero, tails=4)
            wild = simulate(heavy, gates=gates, looks=looks)
            drop = simulate(Scenario(spread=spread, effect=one), gates=gates, looks=looks)
            limit = simulate(Scenario(spread=spread, effect=edge), gates=gates, looks=looks)
            lines.append(
                f"| {cells} | {name} | {same.regressed.any(1).mean():.2%} "
                f"| {wild.regressed.any(1).mean():.2%} | {same.passed.mean():.0%} "
                f"| {same.inconclusive.mean():.0%} | {same.seeds.mean():.1f} "
                f"| {drop.regressed[:, -1].mean():.1%} | {limit.regressed.mean():.1%} |"
            )
    return lines


def main() -> None:
    """Print the tables of docs/ci.md."""
    parser = argparse.ArgumentParser(description="false alarms and power of keelbench check")
    parser.add_argument("--gates", type=int, default=20_000, help="simulated gates per row")
    gates = parser.parse_args().gates
    for looks in (plan(3, 5), plan(3, 8)):
        print(
            f"\nlooks at {', '.join(str(look.seeds) for look in looks)} seeds, {gates} gates\n"
        )
        print("\n".join(table(looks, gates)))


if __name__ == "__main__":
    main()

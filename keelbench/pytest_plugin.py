"""The pytest plugin: a fixture that holds a project to its stability baseline.

    def test_keel_is_as_stable_as_agreed(stability_gate):
        stability_gate("keel", depth=64)

Nothing of keelbench is imported before a test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from keelbench.gate import Baseline, BaselineCell, GateReport

StabilityGate = Callable[..., "GateReport"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``keelbench_baseline`` in the ini file, or ``--keelbench-baseline`` for one run."""
    text = "baseline file that stability_gate compares with"
    parser.addini("keelbench_baseline", text, default="")
    parser.addoption("--keelbench-baseline", default=None, metavar="PATH", help=text)


@pytest.fixture
def stability_gate(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> StabilityGate:
    """Check one cell of a baseline: ``stability_gate(arch, depth=..., **settings)``.

    The cell is the baseline's of that architecture and depth, with all its settings; further
    keywords (``width=64``, ``dtype="bfloat16"``) pick among several, or change a setting,
    which ``allow=("dtype",)`` must then name.

    Keywords: ``baseline`` (path), ``margin``, ``allow``, ``seeds`` (first and most),
    ``strict``. The test fails on every exit code but 0, is skipped if the gate cannot decide
    (fails if ``strict``), and gets the report otherwise.
    """
    config = request.config

    def gate(
        arch: str,
        *,
        depth: int,
        baseline: str | Path | None = None,
        margin: float | None = None,
        allow: Iterable[str] = (),
        seeds: tuple[int, int] = (3, 5),
        strict: bool = False,
        **settings: Any,
    ) -> GateReport:
        from keelbench.errors import KeelbenchError
        from keelbench.gate import load, plan, run_check
        from keelbench.store import Store

        try:
            agreed = load(baseline or _configured(config))
            cell = pick_cell(agreed, arch, depth, settings)
            store = Store(tmp_path_factory.mktemp("stability_gate"))
            report = run_check(
                agreed.only([cell.hash]),
                [cell.spec.replaced(settings)],
                lambda cells, lanes: _run_cells()(cells, lanes, store),
                looks=plan(*seeds),
                margin=margin,
                allow=allow,
                strict=strict,
            )
        except KeelbenchError as error:
            pytest.fail("\n\n".join(filter(None, (error.message, error.hint))), pytrace=False)
        return judge_report(report)

    return gate


def judge_report(report: GateReport) -> GateReport:
    """Fail or skip the running test, or hand the report back."""
    from keelbench.gate import CellVerdict, headline

    text = "\n".join([headline(report), *(f"{c.label}: {c.reason}" for c in report.cells)])
    if report.exit_code:
        pytest.fail(text, pytrace=False)
    if report.verdict is CellVerdict.INCONCLUSIVE:
        pytest.skip(text)
    return report


def pick_cell(
    baseline: Baseline, arch: str, depth: int, settings: dict[str, Any]
) -> BaselineCell:
    """The one cell of this architecture and depth, told apart by settings if need be.

    Raises:
        KeelbenchError: if there is none, or more than one.
    """
    from keelbench.errors import ExitCode, KeelbenchError

    found = [
        cell
        for cell in baseline.cells
        if (cell.spec.model.arch, cell.spec.model.depth) == (arch, depth)
    ]
    agreeing = [cell for cell in found if cell.spec.replaced(settings).hash == cell.hash]
    if len(found) > 1 and agreeing:
        found = agreeing
    if len(found) == 1:
        return found[0]
    there = ", ".join(cell.label for cell in baseline.cells)
    raise KeelbenchError(
        f"baseline '{baseline.name}' has {len(found) or 'no'} cells of {arch} at depth {depth}",
        f"it has {there}" + (": name a setting in which they differ" if found else ""),
        ExitCode.NO_BASELINE,
    )


def _configured(config: pytest.Config) -> Path:
    from keelbench.errors import ExitCode, KeelbenchError
    from keelbench.gate import BASELINES_FOLDER

    if option := config.getoption("--keelbench-baseline"):
        return Path(config.invocation_params.dir, option)
    if ini := config.getini("keelbench_baseline"):
        return Path(config.rootpath, ini)
    there = sorted((config.rootpath / BASELINES_FOLDER).glob("*.json"))
    if len(there) == 1:
        return there[0]
    raise KeelbenchError(
        f"which baseline? {BASELINES_FOLDER} holds {len(there)}",
        "set keelbench_baseline in the pytest ini file, or pass baseline=PATH",
        ExitCode.NO_BASELINE,
    )


def _run_cells() -> Callable[..., Any]:
    from keelbench.sweep import run_cells

    return run_cells

"""The gate: a committed baseline, a check against it, and an answer that CI can act on."""

from keelbench.gate.baseline import (
    Baseline,
    BaselineCell,
    Calibration,
    build_baseline,
    hardware_class,
)
from keelbench.gate.baselines import BASELINES_FOLDER, diff, find_baseline, list_baselines
from keelbench.gate.calibration import calibrate, run_repeats
from keelbench.gate.check import run_check, run_exact
from keelbench.gate.decision import decide
from keelbench.gate.exact import compare_exact
from keelbench.gate.files import baseline_path, load, save
from keelbench.gate.junit import to_junit
from keelbench.gate.outputs import (
    headline,
    rows,
    to_annotations,
    to_json,
    to_markdown,
    to_step_summary,
    to_terminal,
)
from keelbench.gate.sequential import Look, plan
from keelbench.gate.trial import DEFAULT_MARGIN
from keelbench.gate.verdicts import CellReport, CellVerdict, GateReport, LanePair

__all__ = [
    "BASELINES_FOLDER",
    "DEFAULT_MARGIN",
    "Baseline",
    "BaselineCell",
    "Calibration",
    "CellReport",
    "CellVerdict",
    "GateReport",
    "LanePair",
    "Look",
    "baseline_path",
    "build_baseline",
    "calibrate",
    "compare_exact",
    "decide",
    "diff",
    "find_baseline",
    "hardware_class",
    "headline",
    "list_baselines",
    "load",
    "plan",
    "rows",
    "run_check",
    "run_exact",
    "run_repeats",
    "save",
    "to_annotations",
    "to_json",
    "to_junit",
    "to_markdown",
    "to_step_summary",
    "to_terminal",
]

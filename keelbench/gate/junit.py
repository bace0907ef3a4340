"""A gate report as JUnit XML, which CI viewers show as tests: one test case per cell.

https://github.com/testmoapp/junitxml describes what the viewers have in common.
"""

import re
from xml.etree import ElementTree

from keelbench.errors import ExitCode
from keelbench.gate.verdicts import CellReport, GateReport

_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>'
"""Written out, since ElementTree would name the locale's encoding."""

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, such as terminal colours."""


def to_junit(report: GateReport) -> str:
    """JUnit XML.

    A regression is a ``failure``; a cell that could not be compared or run is an ``error``;
    an inconclusive one is ``skipped``, or a ``failure`` if the gate is strict.
    """
    outcomes = [_outcome(cell, report.is_strict) for cell in report.cells]
    counts = {
        "tests": str(len(report.cells)),
        "failures": str(outcomes.count("failure")),
        "errors": str(outcomes.count("error")),
        "skipped": str(outcomes.count("skipped")),
        "time": "0",
    }
    root = ElementTree.Element("testsuites", {"name": "keelbench check", **counts})
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": f"keelbench check {_clean(report.baseline)}", **counts}
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name in ("sweep", "hardware", "detector"):
        value = _clean(getattr(report, name))
        ElementTree.SubElement(properties, "property", {"name": name, "value": value})
    for cell, outcome in zip(report.cells, outcomes, strict=True):
        _add_case(suite, cell, outcome, report.baseline)
    ElementTree.indent(root)
    return f"{_DECLARATION}\n{ElementTree.tostring(root, encoding='unicode')}\n"


def _add_case(
    suite: ElementTree.Element, cell: CellReport, outcome: str | None, baseline: str
) -> None:
    name = {
        "classname": f"keelbench.{_clean(baseline)}",
        "name": _clean(f"{cell.label} [{cell.spec.hash}]"),
        "time": "0",
    }
    case = ElementTree.SubElement(suite, "testcase", name)
    reason = _clean(cell.reason)
    if outcome:
        attributes = {"message": reason}
        if outcome != "skipped":
            attributes["type"] = cell.verdict.value
        ElementTree.SubElement(case, outcome, attributes).text = reason
    lines = [f"{cell.verdict.value}: {reason}", *_lanes(cell)]
    ElementTree.SubElement(case, "system-out").text = "\n".join(lines)


def _outcome(cell: CellReport, is_strict: bool) -> str | None:
    match cell.exit_code:
        case ExitCode.OK:
            return None
        case ExitCode.REGRESSION:
            return "failure"
        case ExitCode.INCONCLUSIVE:
            return "failure" if is_strict else "skipped"
        case _:
            return "error"


def _lanes(cell: CellReport) -> list[str]:
    lines = []
    for pair in cell.pairs:
        before = pair.baseline.outcome if pair.baseline else "absent"
        after = pair.current.outcome if pair.current else "absent"
        lines.append(f"seed {pair.seed}: {_clean(before)} -> {_clean(after)}")
    return lines


def _clean(text: str) -> str:
    return _NOT_XML.sub("", text)

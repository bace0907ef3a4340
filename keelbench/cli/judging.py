"""``keelbench judge``: anybody's training log in, one lane object out."""

from functools import partial
from pathlib import Path
from typing import Any


def judge_log(
    path: Path,
    columns: dict[str, Any],
    slope: float | None,
    unigram_entropy: float | None,
    reference: Path | None,
) -> tuple[dict[str, Any], list[str]]:
    """The lane object of a log, with the log's own step numbers, and notes on repairs."""
    from keelbench.divergence import DETECTOR_VERSION, judge
    from keelbench.logs import read_log
    from keelbench.records import max_lr_of
    from keelbench.report.results_json import verdict_json

    read = partial(read_log, slope=slope, **columns)
    log = read(path=path, unigram_entropy=unigram_entropy)
    healthy = read(path=reference).trace if reference is not None else None
    verdict = judge(log.trace, reference=healthy)
    assert verdict is not None
    max_lr = max_lr_of(log.trace, verdict)
    lane = verdict_json(log.trace, log.in_log_steps(verdict), max_lr)
    lane |= {"seed": None, "seconds": None, "detector": DETECTOR_VERSION, "log": str(path)}
    return lane, log.notes


def print_judgement(lane: dict[str, Any]) -> None:
    """The lane object as a few aligned lines."""
    if lane["max_lr"] is not None:
        answer = f"{lane['max_lr']:.4g}"
    elif lane["at_least"] is not None:
        answer = f">= {lane['at_least']:.4g}"
    else:
        answer = "none"
    lines = {
        "verdict": lane["verdict"].replace("_", " "),
        "rule": lane["rule"],
        "onset step": lane["onset_step"],
        "detected step": lane["detected_step"],
        "Max LR": answer,
        "steps": lane["steps"],
        "reason": lane["reason"],
        "detector": f"version {lane['detector']}",
    }
    width = max(len(name) for name in lines)
    for name, value in lines.items():
        if value is not None:
            print(f"{name:<{width}}  {value}")

"""Writes measured tables into docs/performance.md, between markers."""

from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"


def write_tables(results: dict[str, Any]) -> None:
    """Replace what stands between the markers ``<!-- name -->`` and ``<!-- /name -->``."""
    text = PAGE.read_text(encoding="utf-8")
    text = replaced(text, "environment", _environment(results["environment"]))
    text = replaced(text, "duels", _duels(results["duels"]))
    text = replaced(text, "limit", _limit(results["limit"]))
    if "scaling" in results:
        text = replaced(text, "scaling", _scaling(results["scaling"]))
    PAGE.write_text(text, encoding="utf-8")


def replaced(text: str, name: str, body: str) -> str:
    """The text with one marked part exchanged."""
    start, stop = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = text.partition(start)
    _, found, after = rest.partition(stop)
    if not found:
        raise ValueError(f"{PAGE} lacks the markers {start} and {stop}")
    return f"{before}{start}\n{body}\n{stop}{after}"


def _environment(facts: dict[str, Any]) -> str:
    return (
        f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}, Python "
        f"{facts['python']}, kernels: {facts['kernels']}; load average {facts['load']:.1f} "
        f"at the start; medians of {facts['rounds']} rounds; {facts['clock']}."
    )


def _duels(duels: list[dict[str, Any]]) -> str:
    lines = [
        "| shape | contender | processes × threads | lane-steps/s | advantage | range |",
        "|---|---|---|---|---|---|",
    ]
    for one in duels:
        for row in one["rows"]:
            low, high = row["advantage_range"]
            advantage, spread = f"**{row['advantage']:.2f}×**", f"{low:.2f} to {high:.2f}"
            if row["label"] == "keelbench":
                advantage = spread = ""
            lines.append(
                f"| {one['shape']} | {row['label']} | {row['processes']} × {row['threads']} "
                f"| {row['median']:.3g} | {advantage} | {spread} |"
            )
    return "\n".join(lines)


def _limit(found: dict[str, Any]) -> str:
    rows = [
        ("matrix products alone", found["products"]),
        ("attention alone, the C kernels (RoPE included)", found["attention"]),
        ("attention alone, torch's flash kernel (without RoPE)", found["torch_attention"]),
        ("keelbench's step", found["step"]),
        ("the same with its share of the probe", found["step_with_probe"]),
        ("plain eager step", found["plain_step"]),
    ]
    lines = ["| | CPU ms |", "|---|---|", *(f"| {name} | {ms:.1f} |" for name, ms in rows)]
    lines += [
        "",
        f"Step over (products + torch's attention): **{found['over_torch_limit']:.2f}**; over "
        f"(products + the step's own attention): **{found['over_limit']:.2f}**; the plain step "
        f"stands at {found['plain_over_torch_limit']:.2f}. The probe takes "
        f"{found['probe_share']:.0%} of a run. Best matrix rate of one thread: "
        f"{found['best_gflops']:.0f} GFLOP/s.",
    ]
    return "\n".join(lines)


def _scaling(found: dict[str, Any]) -> str:
    lines = ["| axis | sizes | ms per step | cost grows as |", "|---|---|---|---|"]
    for axis, line in found.items():
        sizes = ", ".join(map(str, line["sizes"]))
        times = ", ".join(f"{value:.0f}" for value in line["milliseconds"])
        lines.append(f"| {axis} | {sizes} | {times} | {axis}^{line['exponent']:.2f} |")
    lines += [
        "",
        "![Cost of a step against depth, width and lanes](images/performance-scaling.png)",
    ]
    return "\n".join(lines)

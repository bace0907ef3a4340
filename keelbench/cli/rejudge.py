"""``keelbench rejudge``: stored lanes read again by this version's detector."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keelbench.cli import app, note
from keelbench.errors import KeelbenchError

if TYPE_CHECKING:
    from keelbench.records import Record


@app.command()
def rejudge(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Results folders.", metavar="RESULTS")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would change, and store nothing.")
    ] = False,
) -> None:
    """Read stored lanes again with this version's detector, without training."""
    from keelbench.cli.read import known_results, load_records

    if not results:
        raise KeelbenchError("rejudge takes one results folder or more", known_results())
    loaded = {}
    for folder in results:
        if len(results) > 1 and folder.is_dir() and not (folder / "records").is_dir():
            note(f"{folder} holds no records")
        else:
            loaded[folder] = load_records(folder)
    for folder, records in loaded.items():
        for line in _read_again(folder, records, is_dry=dry_run):
            print(line)


def _read_again(folder: Path, records: "list[Record]", *, is_dry: bool) -> list[str]:
    """What became of each lane that did not stay the same, and how many of each kind."""
    from keelbench.divergence import DETECTOR_VERSION
    from keelbench.rejudge import Reading
    from keelbench.rejudge import rejudge as read_again
    from keelbench.store import Store

    found: Counter[Reading] = Counter()
    lines = []
    for reading, old, new in read_again(Store(folder), records, is_dry=is_dry):
        found[reading] += 1
        if reading is Reading.MOVED:
            lines.append(f"{_lane(old)}: {_number(old)} -> {_number(new)}")
        elif reading.has_to_run:
            lines.append(f"{_lane(old)}: {reading}, has to run again")
    counts = ", ".join(f"{count} {reading}" for reading, count in sorted(found.items()))
    if not is_dry and any(reading.is_kept for reading in found):
        note(f"keelbench report {folder} makes its tables and figures again")
    return [*lines, f"{folder}: {counts} (detector {DETECTOR_VERSION})"]


def _lane(record: "Record") -> str:
    model = record.cell.model
    size = f"depth {model.depth}, width {model.width}"
    return f"{record.id} {model.arch}, {size}, seed {record.seed}"


def _number(record: "Record") -> str:
    """A lane's number and verdict in a few words."""
    if record.max_lr is not None:
        return f"Max LR {record.max_lr:.4g} ({record.verdict.rule})"
    if record.lower_bound is not None:
        return f"Max LR >= {record.lower_bound:.4g}"
    return record.verdict.kind.replace("_", " ")

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
        list[Path] | None, typer.Argument(help="Results folders.", metavar="RESULTS...")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would change, and store nothing.")
    ] = False,
) -> None:
    """Read stored lanes again with this version's detector, without training."""
    from keelbench.cli.read import known_results, load_records
    from keelbench.divergence import DETECTOR_VERSION
    from keelbench.rejudge import Reading
    from keelbench.rejudge import rejudge as read_again
    from keelbench.store import Store

    if not results:
        raise KeelbenchError("rejudge takes one results folder or more", known_results())
    for folder in results:
        found: Counter[Reading] = Counter()
        for reading, old, new in read_again(
            Store(folder), load_records(folder), is_dry=dry_run
        ):
            found[reading] += 1
            if reading is Reading.MOVED:
                print(f"{_lane(old)}: {_claim(old)} -> {_claim(new)}")
            elif not (reading.is_kept or reading is Reading.CURRENT):
                print(f"{_lane(old)}: {reading}, has to run again")
        counts = ", ".join(f"{count} {reading}" for reading, count in sorted(found.items()))
        print(f"{folder}: {counts} (detector {DETECTOR_VERSION})")
        if not dry_run and any(reading.is_kept for reading in found):
            note(f"keelbench report {folder} makes its tables and figures again")


def _lane(record: "Record") -> str:
    model = record.cell.model
    return f"{model.arch}, depth {model.depth}, width {model.width}, seed {record.seed}"


def _claim(record: "Record") -> str:
    """A lane's number and verdict in a few words."""
    if record.max_lr is not None:
        return f"Max LR {record.max_lr:.4g} ({record.verdict.rule})"
    if record.lower_bound is not None:
        return f"Max LR >= {record.lower_bound:.4g}"
    return record.verdict.kind.replace("_", " ")

"""Stored lanes read again by a newer detector, without training.

A record keeps its whole trace, and a verdict is a pure function of the trace. So a change of
the detector costs nothing but a second look, except where it needs to see more: a ramp ends
with its verdict, and a later verdict needs steps that were never run.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from enum import StrEnum

from keelbench.divergence import DETECTOR_VERSION, judge
from keelbench.records import Record, VerdictKind, max_lr_of, record_id
from keelbench.specs import CellSpec
from keelbench.store import Store


class Reading(StrEnum):
    """What a second look came to."""

    CURRENT = "current"
    """Was judged by this detector already."""
    SAME = "same"
    """The same number again."""
    MOVED = "moved"
    """Another verdict, or another Max LR."""
    TOO_SHORT = "too short"
    """The trace ends before this detector is certain: the lane has to run again."""
    NOT_A_RAMP = "not a ramp"
    """Not one trace but a search over many, or a lane that failed: it has to run again."""

    @property
    def is_kept(self) -> bool:
        """Whether a record of this detector came out."""
        return self in (Reading.SAME, Reading.MOVED)


def rejudged(record: Record) -> tuple[Reading, Record]:
    """What this detector makes of a record's trace; the record as it was if it cannot tell."""
    if record.detector == DETECTOR_VERSION:
        return Reading.CURRENT, record
    if record.cell.ramp.protocol != "ramp" or record.verdict.kind is VerdictKind.FAILED:
        return Reading.NOT_A_RAMP, record
    verdict = judge(record.trace, ended=record.trace.steps >= record.cell.ramp.steps)
    if verdict is None:
        return Reading.TOO_SHORT, record
    new = dataclasses.replace(
        record,
        detector=DETECTOR_VERSION,
        verdict=verdict,
        max_lr=max_lr_of(record.trace, verdict),
    )
    is_same = _claim(new) == _claim(record)
    return Reading.SAME if is_same else Reading.MOVED, new


def _claim(record: Record) -> tuple[object, ...]:
    """What is published about a lane."""
    return record.verdict.kind, record.verdict.rule, record.max_lr, record.lower_bound


def rejudge(
    store: Store, records: Sequence[Record], *, is_dry: bool = False
) -> Iterator[tuple[Reading, Record, Record]]:
    """Read each record again; a new one replaces the old one in the store.

    Yields:
        (reading, the record before, the record after), each after it has been stored. A lane
        that this detector has measured itself meanwhile stays as measured.
    """
    for record in records:
        reading, new = rejudged(record)
        if reading.is_kept and not is_dry:
            if store.load(new.id) is None:
                store.save(new)
            store.remove(record.id)
        yield reading, record, new


def outdated(cells: Sequence[CellSpec], seeds: Sequence[int], store: Store) -> int:
    """How many lanes of a sweep are stored by an older detector alone."""
    older = [str(version) for version in range(1, int(DETECTOR_VERSION))]
    return sum(
        any(store.load(record_id(cell, seed, version)) is not None for version in older)
        for cell in cells
        for seed in seeds
        if store.load(record_id(cell, seed, DETECTOR_VERSION)) is None
    )

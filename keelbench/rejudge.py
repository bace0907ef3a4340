"""Stored lanes read again by a newer detector, without training.

A record keeps its whole trace, and a verdict is a pure function of the trace. So a change of
the detector costs nothing but a second look, except where it needs to see more: a ramp ends
with its verdict, and a later verdict needs steps that were never run.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from enum import StrEnum

from keelbench.divergence import DETECTOR_VERSION, judge
from keelbench.errors import KeelbenchError
from keelbench.records import Record, VerdictKind, max_lr_of, record_id
from keelbench.specs import CellSpec
from keelbench.store import Store


class Reading(StrEnum):
    """What a second look came to."""

    CURRENT = "current"
    """Was judged by this detector, or a newer one."""
    SAME = "same"
    """The same number again."""
    MOVED = "moved"
    """Another verdict, or another Max LR."""
    SUPERSEDED = "measured since"
    """This detector has measured the lane itself meanwhile."""
    TOO_SHORT = "too short"
    """The trace ends before this detector is certain: the lane has to run again."""
    NOT_ONE_RAMP = "not one ramp"
    """A search over many runs, or a lane that failed: it has to run again."""

    @property
    def is_kept(self) -> bool:
        """Whether a record of this detector came out."""
        return self in (Reading.SAME, Reading.MOVED)

    @property
    def has_to_run(self) -> bool:
        """Whether only training can tell."""
        return self in (Reading.TOO_SHORT, Reading.NOT_ONE_RAMP)


def rejudged(record: Record) -> tuple[Reading, Record]:
    """What this detector makes of a record's trace; the record as it was if it cannot tell.

    A diagnosis of which sub-layer moved first is dropped where the onset has moved.
    """
    if not is_older(record):
        return Reading.CURRENT, record
    if record.cell.ramp.protocol != "ramp" or record.verdict.kind is VerdictKind.FAILED:
        return Reading.NOT_ONE_RAMP, record
    verdict = judge(record.trace, ended=record.trace.steps >= record.cell.ramp.steps)
    if verdict is None:
        return Reading.TOO_SHORT, record
    has_moved = verdict.onset_step != record.verdict.onset_step
    new = dataclasses.replace(
        record,
        detector=DETECTOR_VERSION,
        verdict=verdict,
        max_lr=max_lr_of(record.trace, verdict),
        environment=dataclasses.replace(record.environment, detector=DETECTOR_VERSION),
        diagnosis=None if has_moved else record.diagnosis,
    )
    is_same = _published(new) == _published(record)
    return Reading.SAME if is_same else Reading.MOVED, new


def is_older(record: Record) -> bool:
    """Judged by an older detector. Versions are whole numbers; others are left alone."""
    return record.detector.isdecimal() and int(record.detector) < int(DETECTOR_VERSION)


def _published(record: Record) -> tuple[object, ...]:
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
        if is_older(record) and store.has(_id(record.cell, record.seed)):
            reading, new = Reading.SUPERSEDED, record
        else:
            reading, new = rejudged(record)
        if not is_dry:
            if reading.is_kept:
                store.save(new)
            if reading.is_kept or reading is Reading.SUPERSEDED:
                store.remove(record.id)
        yield reading, record, new


def _id(cell: CellSpec, seed: int) -> str:
    return record_id(cell, seed, DETECTOR_VERSION)


def rejudgeable(cells: Sequence[CellSpec], seeds: Sequence[int], store: Store) -> int:
    """How many lanes of a sweep only an older detector has judged, and this one could."""
    versions = [str(version) for version in range(1, int(DETECTOR_VERSION))]
    older = (
        record_id(cell, seed, version)
        for cell in cells
        for seed in seeds
        if not store.has(_id(cell, seed))
        for version in versions
    )
    return sum(_could_be_rejudged(store, name) for name in older if store.has(name))


def _could_be_rejudged(store: Store, name: str) -> bool:
    try:
        record = store.load(name)
    except KeelbenchError:  # damaged: not what anybody has asked for
        return False
    return record is not None and rejudged(record)[0].is_kept

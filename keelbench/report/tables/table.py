"""What a table is before it gets a skin: columns, rows, a caption and notes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from keelbench.report.names import title_of
from keelbench.report.numbers import Number
from keelbench.report.summary import BEST, TIED, Row


@dataclass(frozen=True, slots=True)
class Face:
    """How one skin writes names and numbers."""

    number: Callable[[Number], str]
    titles: bool
    """Pre-LN instead of pre_ln."""
    at_least: str
    missing: str
    marks: Mapping[str, str]
    """What is put behind the name of a row, by its standing."""

    def arch(self, name: str, standing: str = "") -> str:
        return (title_of(name) if self.titles else name) + self.marks.get(standing, "")


IN_CAPTION = 9
"""Importance of a column whose one value stands in the caption."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: the header with its unit, and the text of a row."""

    name: str
    """The field of the tidy row that the text shows."""
    header: str
    """A line break marks where the unit starts; skins without room for two lines join it."""
    text: Callable[[Row, Face], str]
    align: Literal["left", "right"] = "right"
    importance: int = 0
    """0 is always shown; of the others, the higher go first where space is short."""
    in_papers: bool = True
    """False for what a paper would not print, such as the time taken."""
    breaks: bool = False
    """The text is a list that may go on in the next line after a comma."""
    heads: bool = False
    """A setting, which may stand in a line above its rows where space is short."""

    @property
    def joined_header(self) -> str:
        return self.header.replace("\n", " ")

    @property
    def is_emphasised(self) -> bool:
        """True if the best row shows it in bold."""
        return self.name in ("arch", "max_lr")


@dataclass(frozen=True, slots=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str
    """The settings that every number travels with."""
    notes: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    """Fields whose change starts a new section of rows."""

    def section(self, row: Row) -> tuple[object, ...]:
        return tuple(row[field] for field in self.sections)


def _ascii(number: Number) -> str:
    return f"{number.plain} {number.interval}".rstrip()


def _latex(number: Number) -> str:
    power = rf" \times 10^{{{number.exponent}}}" if number.exponent else ""
    interval = rf"\ [{number.low},\, {number.high}]" if number.interval else ""
    return f"${number.mantissa}{power}{interval}$"


PLAIN = Face(_ascii, titles=False, at_least=">= ", missing="-", marks={BEST: " *", TIED: " ~"})
PROSE = Face(_ascii, titles=True, at_least="≥ ", missing="–", marks={BEST: " *", TIED: " ~"})
LATEX = Face(
    _latex,
    titles=True,
    at_least=r"$\geq$ ",
    missing="--",
    marks={BEST: "$^{*}$", TIED: r"$^{\sim}$"},
)

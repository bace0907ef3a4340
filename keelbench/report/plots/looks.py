"""How figures look: one colour, marker and dash per architecture, the same everywhere.

Colours are those of Okabe and Ito (2008), which stay apart under the common colour-vision
deficiencies; markers and dashes tell architectures apart in greyscale.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from keelbench.report.names import title_of

Dash = Literal["-"] | tuple[float, tuple[float, ...]]

INK = "#262626"
"""Text and axes."""
MUTED = "#6e6e6e"
"""Secondary text and reference lines."""
GRID = "#e3e3e3"
PAPER = "#ffffff"

COLUMN_INCHES = 3.4
"""Width of one column of a two-column paper."""
PAGE_INCHES = 7.0
"""Width of its text."""

STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 7.5,
    "axes.labelsize": 7.5,
    "axes.titlesize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "keelbench",
    "svg.fonttype": "path",
    "mathtext.fontset": "dejavusans",
}
"""Settings of every figure; applied while drawing and while saving."""


LONG_TITLE = 18
"""Characters beside an axis that leave room for the data in one column of a paper."""


@dataclass(frozen=True, slots=True)
class Look:
    """The appearance of one architecture."""

    color: str
    marker: str
    dash: Dash
    title: str = ""

    @property
    def axis_title(self) -> str:
        """The title, with long parameters on a line of their own."""
        return self.title.replace(" (", "\n(") if len(self.title) > LONG_TITLE else self.title


FIXED = {
    "keel": Look("#d55e00", "o", "-"),
    "pre_ln": Look("#0072b2", "s", (0, (5, 1.2))),
    "deepnorm": Look("#56b4e9", "D", (0, (5, 1, 1, 1))),
    "mix_ln": Look("#009e73", "^", (0, (3, 1))),
    "hybridnorm": Look("#cc79a7", "P", (0, (3, 1, 1, 1))),
    "post_ln": Look("#4a4a4a", "v", (0, (1.2, 1))),
}
"""The six built-in architectures, in the order of legends."""

CYCLE = (
    Look("#882255", "o", "-"),
    Look("#44aa99", "s", (0, (5, 1.2))),
    Look("#999933", "D", (0, (5, 1, 1, 1))),
    Look("#332288", "^", (0, (3, 1))),
    Look("#cc6677", "P", (0, (3, 1, 1, 1))),
    Look("#117733", "v", (0, (1.2, 1))),
    Look("#ddaa33", "X", "-"),
    Look("#777777", "*", (0, (5, 1.2))),
)
"""All others, in alphabetical order of those that are shown together (Tol's muted colours)."""

DARK = {
    INK: "#e8e6e3",
    MUTED: "#a5a29d",
    GRID: "#3a3a3c",
    PAPER: "#1c1c1e",
    "#d55e00": "#ff8a3d",
    "#0072b2": "#4aa8ea",
    "#56b4e9": "#9ad7ff",
    "#009e73": "#3ccf9f",
    "#cc79a7": "#f0a3cd",
    "#4a4a4a": "#c4c4c4",
    "#882255": "#d9709f",
    "#44aa99": "#6fd3c2",
    "#999933": "#c9c95c",
    "#332288": "#9a8cf0",
    "#cc6677": "#f0909f",
    "#117733": "#55b877",
    "#ddaa33": "#f0c765",
    "#777777": "#b0b0b0",
}
"""The same colours on a dark page."""


def looks_of(archs: Iterable[str]) -> dict[str, Look]:
    """The look of each architecture that is shown together with the others.

    Built-in names look the same in every figure. Others take their look from the cycle in
    alphabetical order, so a look is stable as long as the same architectures are shown.
    """
    names = sorted(set(archs), key=_natural)
    others = [name for name in names if name not in FIXED]
    found = {name: look for name, look in FIXED.items() if name in names}
    found |= {name: _cycled(position) for position, name in enumerate(others)}
    return {
        name: Look(look.color, look.marker, look.dash, title_of(name))
        for name, look in found.items()
    }


def _cycled(position: int) -> Look:
    """A look of the cycle; a later round has the dashes and markers of other entries."""
    round_, place = divmod(position, len(CYCLE))
    color, other = CYCLE[place].color, CYCLE[(place + 3 * round_) % len(CYCLE)]
    return Look(color, other.marker, other.dash)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts alpha=4 before alpha=16."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]

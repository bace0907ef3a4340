"""How a number is written: as many digits as its interval justifies."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keelbench.specs import PAPER_WIDTH

MOST_DECIMALS = 4
"""More digits than this are never meant by an interval over a handful of seeds."""

DEFAULT_DECIMALS = 2
"""Where neither an interval nor a quantum says how well a number is known."""


@dataclass(frozen=True, slots=True)
class Number:
    """A positive number as text: ``mantissa`` x 10^``exponent`` and its interval.

    ``low`` and ``high`` share the exponent, as in 1.01e-2 [0.96, 1.07].
    """

    mantissa: str
    exponent: int = 0
    low: str | None = None
    high: str | None = None

    @property
    def plain(self) -> str:
        """``1.01e-2``; no exponent where it is 0."""
        return f"{self.mantissa}e{self.exponent}" if self.exponent else self.mantissa

    def without_interval(self) -> "Number":
        return Number(self.mantissa, self.exponent)

    @property
    def interval(self) -> str:
        """``[0.96, 1.07]``, or an empty string where no interval is claimed."""
        return "" if self.low is None else f"[{self.low}, {self.high}]"


def scientific(
    value: float, low: float | None = None, high: float | None = None, quantum: float = 0.0
) -> Number:
    """Write a positive value in scientific notation.

    The interval's width gets two significant digits, which leaves the value one uncertain
    digit more than a single seed deserves. Without an interval the value ends at the digit
    of its ``quantum``: the step in which it was read.
    """
    exponent = math.floor(math.log10(value))
    number = _written(value, low, high, quantum, exponent)
    if float(number.mantissa) >= 10:
        number = _written(value, low, high, quantum, exponent + 1)
    return number


def decimal(value: float, low: float | None = None, high: float | None = None) -> Number:
    """Write a positive ratio without exponent, digits by the same rule.

    An end of the interval that is not 1 is never rounded to 1: on which side of it the
    interval lies is what a ratio is read for.
    """
    number = _written(value, low, high, 0.0, 0, most=3)
    for places in range(1, MOST_DECIMALS + 1):
        ends = [(number.low, low), (number.high, high)]
        if not any(text is not None and float(text) == 1 != true for text, true in ends):
            break
        number = _written(value, low, high, 0.0, 0, least=places)
    return number


def estimate_number(row: Mapping[str, Any], name: str) -> Number | None:
    """``max_lr`` or ``normalized`` of a row of the summary, or the lower bound of it.

    None if the row has neither.
    """
    scale = row["width"] / PAPER_WIDTH if name == "normalized" else 1.0
    value, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    if value is None and low is None:
        return None
    quantum = row["slope"]
    if row["quantum_percent"] is not None and row["max_lr"] is not None:
        quantum = row["quantum_percent"] / 100 * row["max_lr"]
    if value is None:
        return scientific(low, quantum=scale * quantum)
    return scientific(value, low, high, scale * quantum)


def short(value: float) -> str:
    """A setting: ``1.6e-4``, ``0.05``, ``8``: three significant digits, no padding."""
    if value == 0 or 1e-2 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def plain_value(value: Any) -> str:
    """Any setting as text: ``1.6e-4``, ``true``, ``none``, ``kjv``."""
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return short(value) if isinstance(value, float) else str(value)


def lr_text(value: float) -> str:
    """An LR to three digits, always with its exponent: ``5e-2``."""
    exponent = math.floor(math.log10(value) + 1e-9)
    mantissa = f"{value / 10.0**exponent:.3g}"
    return f"{mantissa}e{exponent}" if exponent else mantissa


def seconds_text(seconds: float) -> str:
    """``95 s``, ``12 min``, ``3.4 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _written(
    value: float,
    low: float | None,
    high: float | None,
    quantum: float,
    exponent: int,
    least: int = 0,
    most: int = MOST_DECIMALS,
) -> Number:
    scale = 10.0**exponent
    value, quantum = value / scale, quantum / scale
    if low is None or high is None:
        places = _places(quantum, 1) if quantum else DEFAULT_DECIMALS
        return Number(f"{value:.{places}f}", exponent)
    low, high = low / scale, high / scale
    places = _places(high - low, 2) if high > low else _places(quantum, 1)
    places = max(least, min(places, most))
    while places < MOST_DECIMALS and float(f"{low:.{places}f}") == 0:
        places += 1
    return Number(f"{value:.{places}f}", exponent, f"{low:.{places}f}", f"{high:.{places}f}")


def _places(size: float, digits: int) -> int:
    """Decimals that show ``digits`` significant digits of ``size``."""
    if size <= 0:
        return DEFAULT_DECIMALS
    wanted = digits - 1 - math.floor(math.log10(size))
    return max(0, min(MOST_DECIMALS, wanted))


def seeds_text(seeds: Iterable[int]) -> str:
    """``seed 3``, ``seeds 0-4`` for a run of seeds, ``seeds 0, 2, 7`` for others."""
    numbers = list(seeds)
    if len(numbers) == 1:
        return f"seed {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"seeds {numbers[0]}-{numbers[-1]}"
    return "seeds " + ", ".join(map(str, numbers))

"""Figures as inline SVG that follow the page: light or dark, any width."""

import html
import re

from matplotlib.figure import Figure

from keelbench.report.plots.canvas import svg_text
from keelbench.report.plots.looks import DARK


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """An <svg> element whose colours are variables of the page.

    Args:
        figure: what to draw.
        name: unique on the page; ids inside the SVG start with it.
        label: read out in place of the picture.
    """
    text = svg_text(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(xlink:href|href)="#', rf'\1="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r"(fill|stroke): (#[0-9a-f]{6})", _as_variable, text)
    text = re.sub(r'(?<=\bd=")[^"]+', _shortened, text)
    box = re.search(r'viewBox="[^"]+"', text)
    assert box is not None
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{box.group()} role="img" aria-label="{html.escape(label, quote=True)}">'
    )
    return re.sub(r"<svg\b[^>]*>", lambda _: opening, text, count=1)


def _shortened(match: re.Match[str]) -> str:
    """A path to a hundredth of a point, which nobody can see, at half the size."""
    return re.sub(r"(\d+\.\d\d)\d+", r"\1", match.group())


def _as_variable(match: re.Match[str]) -> str:
    property_name, color = match.groups()
    if color not in DARK:
        return match.group()
    return f"{property_name}: var(--{color[1:]}, {color})"


def palette_css() -> str:
    """The palette as variables, in light and in dark."""
    light = "".join(f"--{color[1:]}:{color};" for color in DARK)
    dark = "".join(f"--{color[1:]}:{other};" for color, other in DARK.items())
    names = (
        "--ink:var(--262626);--muted:var(--6e6e6e);--line:var(--e3e3e3);--paper:var(--ffffff);"
    )
    return (
        f":root{{{light}{names}}}\n"
        f"@media (prefers-color-scheme: dark){{:root{{{dark}{names}}}}}\n"
    )

"""Gradients, activations and updates of every sub-layer against depth."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keelbench.report.plots.canvas import log_axis, message, padded, styled
from keelbench.report.plots.looks import INK, MUTED, Look
from keelbench.report.plots.study_panels import Row, by, finite, legend, looks_in, panels

SHOWN_DECADES = 6.0
"""A panel shows this many decades below its largest value: what lies lower is gone."""

QUANTITIES = {
    "relative_grad": "trunk gradient × trunk RMS",
    "shortcut_grad": "gradient through shortcuts",
    "weight_grad": "weight gradient",
    "ratio": "branch / trunk",
    "update_ratio": "update / weight",
    "trunk_rms": "trunk RMS",
}
"""Fields of a site and what they are called."""


ALTERNATING = ("weight_grad", "ratio", "update_ratio")
"""What differs between attention and FFN at every block: one curve through both would be a
band. Each gets its own, the FFN's pale."""

PALE = 0.4
"""Opacity of the FFN's curves."""

CLOSED_FORM = (0, (0.7, 1.6))
"""Dash of the closed form beside the shortcut's gradient."""


@styled
def gradient_figure(profiles: Sequence[Row], *, width: float | None = None) -> Figure:
    """Six quantities against the sub-layer, two rows of panels per depth and width.

    Dotted lines beside the shortcut's gradient are its closed form from the measured branch
    variances.

    Args:
        profiles: ``Profile.to_dict`` of any number of cells.
        width: of the figure, in inches.

    Raises:
        KeelbenchError: if there are no profiles.
    """
    looks = looks_in(profiles)
    shapes = by(profiles, "depth", "width")
    has_widths = len({width for _, width in shapes}) > 1
    names = [(shape, name) for shape in shapes for name in QUANTITIES]
    suffix = {(d, w): _suffix(d, w, has_widths) for d, w in shapes if len(shapes) > 1}
    titles = [QUANTITIES[name] + suffix.get(shape, "") for shape, name in names]
    figure, grid = panels(titles, columns=3, width=width)
    for axes, (shape, name) in zip(grid, names, strict=True):
        _draw(axes, shapes[shape], looks, name)
        axes.set_xlim(-0.02 * shape[0], 1.02 * shape[0])
    for axes in grid[-3:]:
        axes.set_xlabel("sub-layer")
    strokes: dict[str, dict[str, Any]] = {"FFN": {"alpha": PALE}}
    if any(site["predicted_shortcut"] for p in profiles for site in p["sites"]):
        strokes["closed form"] = {"linestyle": CLOSED_FORM}
    legend(figure, looks.values(), has_markers=False, strokes=strokes)
    return figure


def _suffix(depth: int, width: int, has_widths: bool) -> str:
    return f", {depth} × {width}" if has_widths else f", L = {depth}"


def _draw(axes: Axes, profiles: Sequence[Row], looks: dict[str, Look], name: str) -> None:
    values = [v for p in profiles for v in finite(site[name] for site in p["sites"]) if v > 0]
    if not values:
        message(axes, "nothing finite was measured")
        return
    high = max(values)
    low = max(min(values), high * 10**-SHOWN_DECADES)
    log_axis(axes, "y", *padded(low, high), labels=5)
    for profile in profiles:
        look = looks[profile["arch"]]
        sites = profile["sites"]
        if name in ALTERNATING:
            attention, ffn = (by(sites, "branch").get(b, []) for b in ("attention", "ffn"))
            _curve(axes, ffn, name, color=look.color, linestyle=look.dash, alpha=PALE)
            _curve(axes, attention, name, color=look.color, linestyle=look.dash)
        else:
            _curve(axes, sites, name, color=look.color, linestyle=look.dash)
        if name == "shortcut_grad":
            color = INK if look.color == MUTED else look.color
            _curve(axes, sites, "predicted_shortcut", color=color, linestyle=CLOSED_FORM)


def _curve(axes: Axes, sites: Sequence[Row], name: str, **style: Any) -> None:
    found = [(site["index"], site[name]) for site in sites if site[name]]
    if found:
        x, y = zip(*found, strict=True)
        axes.plot(x, y, linewidth=1.0, **style)

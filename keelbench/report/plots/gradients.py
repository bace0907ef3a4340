"""Gradients, activations and updates of every sub-layer against depth."""

from collections.abc import Callable, Sequence

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


@styled
def gradient_figure(profiles: Sequence[Row], *, width: float | None = None) -> Figure:
    """Six quantities against the sub-layer, a row of panels per depth.

    Dotted lines beside the shortcut's gradient are its closed form from the measured branch
    variances.

    Args:
        profiles: ``Profile.to_dict`` of any number of cells.
        width: of the figure, in inches.

    Raises:
        KeelbenchError: if there are no profiles.
    """
    looks = looks_in(profiles)
    depths = by(profiles, "depth")
    names = [(depth, name) for depth in depths for name in QUANTITIES]
    titles = [
        f"{QUANTITIES[name]}, L = {depth}" if len(depths) > 1 else QUANTITIES[name]
        for depth, name in names
    ]
    figure, grid = panels(titles, columns=3, width=width)
    for axes, (depth, name) in zip(grid, names, strict=True):
        _draw(axes, depths[depth], looks, name)
        axes.set_xlim(-0.02 * depth, 1.02 * depth)
    for axes in grid[-3:]:
        axes.set_xlabel("sub-layer")
    legend(figure, looks.values())
    return figure


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
        _curve(axes, profile, look, lambda site: site[name], linestyle=look.dash)
        if name == "shortcut_grad":
            _curve(
                axes,
                profile,
                look,
                lambda site: site["predicted_shortcut"],
                linestyle=(0, (0.7, 1.6)),
                color=INK if look.color == MUTED else look.color,
            )


def _curve(
    axes: Axes,
    profile: Row,
    look: Look,
    read: Callable[[Row], float | None],
    **style: object,
) -> None:
    found = [(site["index"], value) for site in profile["sites"] if (value := read(site))]
    if found:
        x, y = zip(*found, strict=True)
        axes.plot(x, y, **{"color": look.color, "linewidth": 1.0, **style})  # type: ignore[arg-type]

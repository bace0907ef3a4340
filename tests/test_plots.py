"""Figures: any input, no warnings, the same look everywhere, the same bytes every time."""

import dataclasses
import io
import itertools
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import sample
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from keelbench.archs import ARCHS
from keelbench.errors import KeelbenchError
from keelbench.records import Record, VerdictKind
from keelbench.report.plots import (
    PairedRow,
    Span,
    comparison_figure,
    depth_figure,
    figures,
    grad_norm_figure,
    loss_figure,
    max_lr_figure,
    paired_figure,
    save,
    settings_figure,
    single_changes,
    svg_text,
)
from keelbench.report.plots.canvas import log_ticks, spread
from keelbench.report.plots.looks import CYCLE, DARK, FIXED, PAPER, looks_of
from keelbench.report.plots.traces import BINS, thinned
from keelbench.stats import estimate

FIGURES = {
    "max_lr": max_lr_figure,
    "depth": depth_figure,
    "loss": loss_figure,
    "grad_norm": grad_norm_figure,
}


def drawn(figure: Figure) -> Figure:
    """Really drawn, in memory, at a low resolution: warnings are errors here."""
    figure.savefig(io.BytesIO(), format="png", dpi=40)
    return figure


@pytest.mark.parametrize("name", ["mixed", "no steps", "never learned", "two widths"])
def test_awkward_input_can_be_compared(name: str) -> None:
    records = sample.awkward()[name]
    for axes in drawn(comparison_figure(records, records)).axes:
        assert shows_something(axes)


def shows_something(axes: Axes) -> bool:
    texts = [text for text in axes.texts if text.get_text().strip()]
    lines = [line for line in axes.lines if len(line.get_xdata())]
    return bool(texts or lines or axes.collections)


@pytest.mark.parametrize("name", sample.awkward())
@pytest.mark.parametrize("kind", FIGURES)
def test_awkward_input_gives_a_whole_figure(kind: str, name: str) -> None:
    figure = drawn(FIGURES[kind](sample.awkward()[name]))
    assert figure.axes
    for axes in figure.axes:
        assert shows_something(axes), "an empty axis"
        for low, high in (axes.get_xlim(), axes.get_ylim()):
            assert np.isfinite([low, high]).all() and low < high


@pytest.mark.parametrize("width", [2.5, 7.0])
def test_figures_have_the_width_that_was_asked_for(width: float) -> None:
    records = sample.study(archs=("keel", "post_ln"), seeds=1)
    for draw in (max_lr_figure, depth_figure, loss_figure, grad_norm_figure):
        assert drawn(draw(records, width=width)).get_figwidth() == width


def test_axes_carry_units_and_what_the_number_depends_on() -> None:
    records = sample.study(seeds=1)
    label = max_lr_figure(records).axes[-1].get_xlabel()
    assert label == "Max LR (slope 1.6e-4 per step, width 64)"
    loss = loss_figure(records)
    assert loss.get_supylabel() == "probe loss (nats per token)"
    assert loss.get_supxlabel() == "LR (slope 1.6e-4 per step, width 64)"
    assert "sub-layers" in depth_figure(records).axes[-1].get_xlabel()
    widths = [*records, *sample.study(width=256, seeds=1)]
    assert "× width / 1024" in max_lr_figure(widths).axes[-1].get_xlabel()


def test_every_seed_is_a_dot_at_its_max_lr() -> None:
    records = sample.study(archs=("keel",), depths=(64,), seeds=5)
    (axes,) = max_lr_figure(records).axes
    rings = [line for line in axes.lines if line.get_markerfacecolor() == PAPER]
    assert sorted(float(line.get_xdata()[0]) for line in rings) == pytest.approx(
        sorted(record.max_lr or 0.0 for record in records)
    )


def arrows(axes: Axes) -> int:
    return sum(getattr(text, "arrow_patch", None) is not None for text in axes.texts)


def test_censored_lanes_are_arrows_and_no_value_is_said_in_words() -> None:
    (axes,) = max_lr_figure(sample.mixed()).axes
    assert arrows(axes) == 5 + 2, "a survivor each, and each cell with a bound"
    texts = {text.get_text() for text in axes.texts}
    assert {"failed", "never learned", "≥ 6.40e-2"} <= texts
    healthy = max_lr_figure(sample.study(depths=(64,))).axes[0]
    assert arrows(healthy) == 0


def test_a_diverged_loss_does_not_squash_the_rest() -> None:
    (axes,) = loss_figure(sample.awkward()["loss of 1e4"]).axes
    low, high = axes.get_ylim()
    assert high < 5.5 and low > 2


def test_onsets_are_marked_where_max_lr_is_read() -> None:
    record = sample.record()
    (axes,) = loss_figure([record]).axes
    marks = [line for line in axes.lines if len(line.get_xdata()) == 1]
    assert [float(mark.get_xdata()[0]) for mark in marks] == [record.max_lr]


def test_the_unigram_entropy_is_labelled_directly() -> None:
    (axes,) = loss_figure(sample.real()).axes
    assert any(text.get_text() == "unigram\nentropy 3.11" for text in axes.texts)


def test_held_runs_are_drawn_against_steps() -> None:
    held = sample.record(ramp__protocol="hold")
    lr = np.minimum(held.trace.lr, 0.02)
    held = dataclasses.replace(held, trace=dataclasses.replace(held.trace, lr=lr), max_lr=0.019)
    figure = drawn(loss_figure([held]))
    assert figure.get_supxlabel().startswith("step")


def colors(figure: Figure) -> set[str]:
    return {str(line.get_color()) for axes in figure.axes for line in axes.lines}


def test_one_look_per_architecture_in_every_figure() -> None:
    records = sample.study(archs=("keel", "post_ln"), seeds=1)
    for draw in (max_lr_figure, depth_figure, loss_figure, grad_norm_figure):
        found = colors(draw(records))
        assert {FIXED["keel"].color, FIXED["post_ln"].color} <= found
        assert FIXED["pre_ln"].color not in found
    assert looks_of(["keel"])["keel"] == looks_of(FIXED)["keel"]


def test_looks_differ_in_colour_marker_and_dash() -> None:
    for family in (FIXED.values(), CYCLE):
        for first, second in itertools.combinations(family, 2):
            assert first.color != second.color and first.marker != second.marker
    for first, second in itertools.combinations(FIXED.values(), 2):
        assert first.dash != second.dash


def gray(color: str) -> float:
    """Luma of a colour, 0 to 1: what is left of it in greyscale."""
    return float(np.dot(to_rgb(color), (0.299, 0.587, 0.114)))


def test_colours_are_readable_on_paper_and_on_a_dark_page() -> None:
    for look in (*FIXED.values(), *CYCLE):
        assert gray(look.color) < 0.75
        assert gray(DARK[look.color]) > 0.5


def test_other_rules_take_looks_in_order_of_their_parameters() -> None:
    names = [f"keel(alpha={alpha})" for alpha in (16, 4, 256, 64)]
    looks = looks_of(names)
    assert list(looks) == [f"keel(alpha={alpha})" for alpha in (4, 16, 64, 256)]
    assert [looks[name].color for name in looks] == [look.color for look in CYCLE[:4]]
    assert looks_of(reversed(names)) == looks


@pytest.mark.parametrize("floor", [sample.UNIGRAM + 0.01, sample.UNIGRAM + 0.1])
def test_a_label_stays_within_its_panel(floor: float) -> None:
    """A model that never gets below the unigram entropy: the line lies at the very bottom."""
    steps = 200
    trace = sample.trace(steps, None, floor=floor)
    record = dataclasses.replace(sample.record(kind=VerdictKind.SURVIVED), trace=trace)
    figure = drawn(loss_figure([record]))
    (axes,) = figure.axes
    inside = axes.get_window_extent()
    for text in axes.texts:
        box = text.get_window_extent()
        assert inside.y0 - 1 <= box.y0 and box.y1 <= inside.y1 + 1


def test_a_survivor_whose_loss_has_left_the_panel_does_not_break_the_layout() -> None:
    trace = sample.trace(200, 150, after=40.0)
    record = dataclasses.replace(sample.record(kind=VerdictKind.SURVIVED), trace=trace)
    figure = drawn(loss_figure([record]))  # a layout that collapses warns
    assert figure.axes[0].get_ylim()[1] < 10


def test_every_built_in_rule_looks_different() -> None:
    looks = looks_of(ARCHS.names())
    assert len({(look.color, look.marker, look.dash) for look in looks.values()}) == len(looks)


def test_more_rules_than_looks_still_work() -> None:
    records = [sample.record(f"rule_{number}", 64, 0) for number in range(12)]
    for draw in (max_lr_figure, loss_figure):
        figure = draw(records)
        drawn(figure)
        assert "rule_11" in svg_text(figure)


def varied() -> list[Record]:
    """Two architectures at a base setting; batch and text changed alone, two at once once."""
    settings: list[dict[str, object]] = [
        {},
        {"data__batch": 2},
        {"data__batch": 16},
        {"data__source": "markov"},
        {"data__batch": 16, "data__seq": 128},
    ]
    records = [
        sample.record(arch, 64, seed, **setting)  # type: ignore[arg-type]
        for setting in settings
        for arch in ("keel", "pre_ln")
        for seed in range(3)
    ]
    return [*records, sample.record("deepnorm", 64, 0)]


def test_settings_changed_alone_are_found_and_nothing_else() -> None:
    found = single_changes(varied())
    assert list(found) == ["data.source", "data.batch"], "seq changed with batch only"
    batches = {(row["arch"], row["value"]): row for row in found["data.batch"]}
    assert {arch for arch, _ in batches} == {"keel", "pre_ln"}, "deepnorm has one value"
    assert [batches["keel", batch]["place"] for batch in (2, 8, 16)] == [0, 1, 2]
    assert [batches["keel", batch]["is_base"] for batch in (2, 8, 16)] == [False, True, False]
    values = [r for r in varied() if r.cell.data.batch == 2 and r.cell.model.arch == "keel"]
    mean = estimate([record.max_lr or 0 for record in values]).mean
    assert batches["keel", 2]["shown"] == pytest.approx((mean or 0) * 64 / 1024)


def test_depths_and_single_cells_need_no_figure_of_settings() -> None:
    deep = [sample.record("keel", depth, 0) for depth in (64, 512)]
    assert single_changes(deep) == {} and "settings" not in figures(deep)
    with pytest.raises(KeelbenchError):
        settings_figure(single_changes(deep))


def test_the_figure_of_settings_has_a_panel_for_each() -> None:
    figure = drawn(settings_figure(single_changes(varied())))
    assert [axes.get_title("left") for axes in figure.axes] == ["text", "sequences per step"]
    ticks = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert ticks == ["2", "8", "16"]


def test_a_survivor_among_changed_settings_gets_an_arrow() -> None:
    healthy = sample.record("keel", 64, 0, kind=VerdictKind.SURVIVED, data__batch=4)
    changed = single_changes([*varied(), healthy])
    figure = drawn(settings_figure(changed))
    (bound,) = [row for row in changed["data.batch"] if row["is_bound"]]
    assert (bound["value"], bound["shown_low"]) == (4, None)
    assert [len(axes.texts) for axes in figure.axes] == [0, 1]


def test_saving_is_reproducible(tmp_path: Path) -> None:
    records = sample.study(archs=("keel", "pre_ln"), seeds=2)
    first = save(max_lr_figure(records), tmp_path / "a")
    second = save(max_lr_figure(records), tmp_path / "b")
    assert [path.name for path in first] == ["a.png", "a.svg"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    with Image.open(first[0]) as image:
        assert image.width == round(3.4 * 200)
    text = first[1].read_text(encoding="utf-8")
    assert "<date>" not in text and text.rstrip().endswith("</svg>")


def test_the_style_of_the_process_is_neither_used_nor_changed() -> None:
    records = sample.study(archs=("keel",), seeds=1)
    expected = svg_text(max_lr_figure(records))
    with mpl.rc_context({"font.size": 30, "axes.spines.top": True, "svg.hashsalt": "other"}):
        before = dict(mpl.rcParams)
        assert svg_text(max_lr_figure(records)) == expected
        assert dict(mpl.rcParams) == before


def test_figures_are_those_that_have_something_to_say() -> None:
    assert list(figures(sample.study(seeds=1))) == ["maxlr", "depth", "curves", "grad_norm"]
    assert list(figures([sample.record()])) == ["maxlr", "curves", "grad_norm"]
    bare = sample.record()
    bare = dataclasses.replace(bare, trace=dataclasses.replace(bare.trace, grad_norm=None))
    assert list(figures([bare])) == ["maxlr", "curves"]


def test_a_comparison_shows_ratios_and_notes() -> None:
    first = sample.study(archs=("keel", "pre_ln"), depths=(64,))
    second = sample.study(archs=("keel",), depths=(64,))
    notes = {second[0].cell.hash: "pass"}
    (axes,) = drawn(comparison_figure(first, second, "old", "new", notes=notes)).axes
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["one side only", "× 1.00  pass"]


def test_paired_rows_can_come_from_estimates() -> None:
    value, bound = estimate([0.01, 0.011, 0.012]), estimate([], lower_bounds=[0.02])
    assert Span.of(estimate([])) is None
    rows = [
        PairedRow(panel="depth 64", arch="keel", first=Span.of(value), second=Span.of(bound)),
        PairedRow(panel="depth 64", arch="pre_ln", first=None, second=None, note="missing"),
    ]
    (axes,) = drawn(paired_figure(rows, ("baseline", "current"))).axes
    assert arrows(axes) == 1


@given(
    st.floats(-6, 1),
    st.floats(0.01, 5),
    st.integers(2, 8),
)
def test_log_ticks_are_few_and_inside(start: float, decades: float, most: int) -> None:
    low, high = 10**start, 10 ** (start + decades)
    ticks = log_ticks(low, high, most)
    assert 1 <= len(ticks) <= max(most, 5)
    assert all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)
    assert ticks == sorted(ticks)


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0.001, 0.2))
def test_spread_labels_keep_their_order_and_distance(
    positions: list[float], gap: float
) -> None:
    placed = spread(positions, gap)
    order = sorted(range(len(positions)), key=lambda index: (positions[index], index))
    for lower, upper in itertools.pairwise(order):
        assert placed[upper] - placed[lower] >= gap - 1e-9
    if len(positions) == 1:
        assert placed == positions


def test_thinning_keeps_ends_and_extremes() -> None:
    x = np.arange(1.0, 20001.0)
    y = np.sin(x)
    y[777], y[15000] = 9.0, -9.0
    thin_x, thin_y = thinned(x, y)
    assert len(thin_x) <= 2 * BINS + 4
    assert {1.0, 20000.0} <= set(thin_x.tolist())
    assert (thin_y.max(), thin_y.min()) == (9.0, -9.0)


def test_survivors_end_in_an_open_arrow() -> None:
    lane: Record = sample.record(kind=VerdictKind.SURVIVED)
    (axes,) = drawn(loss_figure([lane])).axes
    assert [line.get_marker() for line in axes.lines].count(">") == 1

"""The report page: self-contained, honest, and whole on a phone and on a desktop."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import sample

from keelbench.divergence import DEFAULT_THRESHOLDS
from keelbench.records import Record
from keelbench.report.html import render_comparison, render_html
from keelbench.report.html.parts import documented_fields
from keelbench.report.html.reproduce import commands
from keelbench.report.plots import max_lr_figure
from keelbench.report.plots.inline import inline_svg
from keelbench.report.plots.looks import DARK

VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Tags that must close, ids that must be unique, text that people see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def study_page() -> str:
    records = sample.study(archs=("keel", "pre_ln", "post_ln"))
    return render_html(records, title="results/default")


def test_page_is_well_formed_with_unique_ids(study_page: str) -> None:
    page = Page(study_page)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids)) > 100


def test_page_needs_nothing_from_anywhere(study_page: str) -> None:
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+[^\s\"'<>]*", study_page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "<script" not in study_page and "@import" not in study_page
    sources = {"src", "href", "xlink:href", "action", "data"}
    for name, value in Page(study_page).attributes:
        if name in sources:
            assert value.startswith(("#", "data:,")), (name, value)


def test_page_says_what_the_number_rests_on(study_page: str) -> None:
    text = " ".join(Page(study_page).text.split())
    for name, value, doc in documented_fields(DEFAULT_THRESHOLDS):
        assert name in text and f"{value:g}" in text
        assert doc and doc in text, f"threshold {name} has no documentation"
    for part in ("weight_decay", "slope 1.6e-4", "torch", "2.13.0", "Judged by detector"):
        assert part in text
    assert "keelbench compare --arch" in text and "--seeds 3" in text
    assert "5.60e-2 [5.21, 6.01]" in text


def test_page_shows_all_figures_with_captions(study_page: str) -> None:
    labels = re.findall(r'role="img" aria-label="([^"]+)"', study_page)
    assert len(labels) == 6, "two figures, and two more for wide and narrow screens each"
    assert study_page.count("<figcaption>") == 4


def test_figures_follow_the_colours_of_the_page(study_page: str) -> None:
    assert "prefers-color-scheme: dark" in study_page
    svg = inline_svg(max_lr_figure(sample.mixed()), "x", 'a "b" & c')
    assert 'aria-label="a &quot;b&quot; &amp; c"' in svg
    plain = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg))
    assert not plain, "every colour has a counterpart on a dark page"
    for color, dark in DARK.items():
        assert f"--{color[1:]}:{color};" in study_page
        assert f"--{color[1:]}:{dark};" in study_page


def test_names_cannot_break_the_page() -> None:
    evil = "<script>alert(1)</script>"
    record = sample.record(f"{evil}.py:Rule", data__source=f"text:{evil}")
    page = render_html([record], title=evil, command=f"run {evil}")
    assert evil not in page and html.escape(evil) in page


@pytest.mark.parametrize("name", ["no steps", "mixed", "all NaN"])
def test_awkward_results_have_a_page(name: str) -> None:
    assert Page(render_html(sample.awkward()[name])).open == []


def test_an_older_detector_is_said() -> None:
    page = render_html([sample.record(detector="0")])
    assert "Judged by detector version 0. The thresholds below are those of" in page


def test_every_environment_is_shown() -> None:
    lanes = sample.study(archs=("keel",), depths=(64,))
    other = dataclasses.replace(lanes[0].environment, torch="2.14.0")
    page = render_html([*lanes[:2], dataclasses.replace(lanes[2], environment=other)])
    assert "<h3>2 lanes</h3>" in page and "<h3>1 lane</h3>" in page and "2.14.0" in page


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (
            sample.study(archs=("keel", "pre_ln"), depths=(64, 512)),
            ["keelbench compare --arch keel,pre_ln --depth 64,512 --width 64 --seeds 3"],
        ),
        (
            sample.study(archs=("keel(alpha=4)",), depths=(64,), data__batch=16),
            [
                "keelbench compare --arch 'keel(alpha=4)' --depth 64 --width 64 --seeds 3 "
                "data.batch=16"
            ],
        ),
        (
            [sample.record("keel", 64, 5)],
            ["keelbench compare --arch keel --depth 64 --width 64 --seeds 5,"],
        ),
        (
            [sample.record("keel", 64, seed) for seed in (1, 4)],
            ["keelbench compare --arch keel --depth 64 --width 64 --seeds 1,4"],
        ),
        (
            [sample.record("keel", 64), sample.record("pre_ln", 128)],
            [
                "keelbench compare --arch keel --depth 64 --width 64 --seeds 1",
                "keelbench compare --arch pre_ln --depth 128 --width 64 --seeds 1",
            ],
        ),
    ],
)
def test_commands_repeat_the_cells(records: list[Record], expected: list[str]) -> None:
    assert commands(records) == expected


def test_comparison_puts_two_results_side_by_side() -> None:
    first = sample.study(archs=("keel", "pre_ln"), depths=(64,))
    second = sample.study(archs=("keel",), depths=(64,), data__batch=16)
    text = render_comparison(first, second, "runs/a", "runs/b")
    page = Page(text)
    assert page.open == [] and len(page.ids) == len(set(page.ids))
    for part in ("runs/a: settings", "runs/b: settings", "data.batch 8 -> 16", "1.00"):
        assert part in page.text


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=4000",
    "--dump-dom",
)

WIDTHS = (390, 1280)

REPORT_SIZE = """<script>addEventListener("load", () => parent.postMessage(
  [innerWidth, document.documentElement.scrollWidth], "*"))</script></body>"""

FRAMES = """<!doctype html><title>waiting</title><script>
const sizes = [];
addEventListener("message", (event) => {
  sizes.push(event.data);
  document.title = "sizes " + JSON.stringify(sizes);
});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_no_console_error_and_no_sideways_scroll_in_chromium(
    tmp_path: Path, study_page: str
) -> None:
    """A frame of each width, since a window cannot be as narrow as a phone."""
    pages = {
        "study": study_page,
        "comparison": render_comparison(sample.mixed(), sample.study(depths=(64,)), "a", "b"),
    }
    frames = FRAMES
    for name, text in pages.items():
        shown = text.replace("<details>", "<details open>").replace("</body>", REPORT_SIZE)
        (tmp_path / f"{name}.html").write_text(shown, encoding="utf-8")
        for width in WIDTHS:
            frames += f'<iframe src="{name}.html" width="{width}" height="900"></iframe>'
    (tmp_path / "frames.html").write_text(frames, encoding="utf-8")
    ran = subprocess.run(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "frames.html"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    title = re.search(r"<title>sizes (.*?)</title>", ran.stdout)
    assert title is not None, ran.stderr[-2000:]
    sizes = json.loads(title.group(1))
    # A frame's border and scroll bar take up to 20 of its pixels.
    assert sorted(round(inner, -1) for inner, _ in sizes) == [390, 390, 1280, 1280]
    assert all(content <= inner for inner, content in sizes), sizes
    assert "CONSOLE" not in ran.stderr, ran.stderr

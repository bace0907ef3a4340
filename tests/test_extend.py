"""docs/extend.md, followed as a reader would: its files, its commands."""

import re
import shlex
from pathlib import Path

import pytest
from helpers import tiny_cell

from keelbench.archs import make_rule
from keelbench.cli import run
from keelbench.contract import all_passed, check_rule
from keelbench.engine import Engine
from keelbench.foreign import open_engine

PAGE = (Path(__file__).parent.parent / "docs" / "extend.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's Python files in the current folder."""
    monkeypatch.chdir(tmp_path)
    for block in blocks("python"):
        name = block.partition("\n")[0].removeprefix("# ")
        Path(name).write_text(block, encoding="utf-8")


def test_the_page_has_a_rule_a_model_and_an_optimizer() -> None:
    names = [block.partition("\n")[0] for block in blocks("python")]
    assert names == ["# my_rule.py", "# my_model.py", "# my_optimizer.py"]


def test_the_rule_is_short_and_keeps_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    code = [line for line in blocks("python")[0].splitlines()[1:] if line]
    assert len(code) <= 15
    assert all_passed(check_rule("my_rule.py:Scaled(scale=0.1)"))
    rule = make_rule("my_rule.py:Scaled")
    assert rule.final_norm and rule.title == "Scaled branches"
    assert run(["archs", "check", "my_rule.py:Scaled"]) == 0
    assert capsys.readouterr().out.strip() == blocks("text")[0].strip()


def test_the_rule_trains() -> None:
    engine = Engine(tiny_cell("my_rule.py:Scaled"), [0], 2)
    engine.advance(tiny_lrs(2))
    assert engine.losses()[1, 0] != engine.losses()[0, 0]


def test_the_model_trains_as_deep_and_wide_as_asked() -> None:
    cell = tiny_cell(module="my_model.py:build", depth=4, width=16)
    engine = open_engine(cell, [0, 1], 2)
    engine.advance(tiny_lrs(2, 2))
    assert engine.losses().shape == (2, 2)
    module = engine.model.modules[0]  # type: ignore[attr-defined]
    assert len(module.blocks.layers) == 2 and module.embedding.weight.shape[1] == 16


def test_the_optimizer_trains() -> None:
    cell = tiny_cell("keel", **{"optim.name": "my_optimizer.py:lion_like"})
    engine = Engine(cell, [0], 3)
    engine.advance(tiny_lrs(3))
    assert engine.losses()[2, 0] != engine.losses()[1, 0]


def tiny_lrs(steps: int, lanes: int = 1):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.full((steps, lanes), 1e-2)


@pytest.mark.parametrize("command", blocks("sh"))
def test_the_commands_exist_with_their_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in command.strip().splitlines():
        program, *arguments = shlex.split(line)
        assert program == "keelbench"
        names = [word for word in arguments if word.startswith("--")]
        path = [arguments[0], "check"] if arguments[0] == "archs" else arguments[:1]
        assert run([*path, "--help"]) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in names), line

"""Tasks with known answers: an independent solver finds every answer, and scores count it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refusal, tiny_cell
from matplotlib.figure import Figure

from keelbench.data import open_source
from keelbench.engine import Engine
from keelbench.report.plots.tasks import task_figure
from keelbench.specs import DataSpec
from keelbench.task_scores import disagreements, score, summary_rows, task_scores
from keelbench.tasks import TASKS, TaskSource, examples, make_task, open_task
from keelbench.training import Schedule

LENGTH = 65


def solve_induction(before: list[int]) -> int:
    earlier = before[:-1]
    return earlier[earlier.index(before[-1]) + 1] if before[-1] in earlier else -1


def solve_hops(before: list[int], hops: int = 2, symbols: int = 5) -> int:
    pairs = dict(zip(before[: 2 * symbols : 2], before[1 : 2 * symbols : 2], strict=True))
    place = before[-1]
    for _ in range(hops):
        place = pairs[place]
    return place


def solve_arithmetic(before: list[int], modulus: int = 5, terms: int = 2) -> int:
    chain = before[-2 * terms : -1]
    text = str(chain[0])
    for sign, digit in zip(chain[1::2], chain[2::2], strict=True):
        text = f"({text}{'+-*'[sign - modulus]}{digit})"
    return int(eval(text)) % modulus


def solve_brackets(before: list[int], kinds: int = 6) -> int:
    open_kinds: list[int] = []
    for token in before[:-1]:
        if token < kinds:
            open_kinds.append(token)
        elif token < 2 * kinds:
            assert open_kinds.pop() == token - kinds
    assert before[-1] == 2 * kinds
    return kinds + open_kinds[-1]


SOLVERS: dict[str, Callable[[list[int]], int]] = {
    "induction": solve_induction,
    "hops": solve_hops,
    "hops(hops=3, symbols=8)": lambda before: solve_hops(before, 3, 8),
    "arithmetic": solve_arithmetic,
    "arithmetic(modulus=7, terms=5)": lambda before: solve_arithmetic(before, 7, 5),
    "brackets": solve_brackets,
    "brackets(kinds=3, deepest=2)": lambda before: solve_brackets(before, 3),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_finds_every_answer_in_what_comes_before_it(name: str) -> None:
    task = make_task(name)
    rows, known = examples(task, np.random.default_rng(5), 12, LENGTH)
    assert rows.shape == known.shape == (12, LENGTH)
    assert known[:, 1:].mean() > 0.05 and not known[:, 0].any()
    assert rows.min() >= 0 and rows.max() < task.vocab
    for tokens, is_answer in zip(rows.tolist(), known.tolist(), strict=True):
        for place in np.flatnonzero(is_answer):
            assert SOLVERS[name](tokens[:place]) == tokens[place]


def test_free_tokens_of_a_block_are_distinct_and_the_rest_is_copied() -> None:
    task = make_task("induction(symbols=30)")
    tokens, known = task.sequence(np.random.default_rng(0), LENGTH)
    period = int(np.argmax(known)) - 1
    assert len(set(tokens[:period].tolist())) == period
    assert known[period + 1 :].all() and not known[: period + 1].any()


@pytest.mark.parametrize("name", TASKS.names())
def test_a_task_is_a_data_source(name: str) -> None:
    source = open_source(DataSpec(source=f"task:{name}", seq=LENGTH - 1))
    assert isinstance(source, TaskSource) and source.name == f"task:{name}"
    batch = source.batch(3, 7, 4, LENGTH - 1)
    assert batch.shape == (4, LENGTH) and batch.dtype == np.int64
    assert (batch == source.batch(3, 7, 4, LENGTH - 1)).all()
    assert (batch != source.batch(3, 8, 4, LENGTH - 1)).any()
    assert (batch != source.batch(4, 7, 4, LENGTH - 1)).any()
    assert (source.probe(4, LENGTH - 1) == source.held_out(4, LENGTH - 1)[0]).all()
    assert batch.max() < source.vocab
    assert 0 < source.unigram_entropy < math.log(source.vocab) + 1e-9
    assert source.task.title and source.task.example


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("task:", "known: induction, hops, arithmetic, brackets"),
        ("task:induktion", "did you mean 'induction'?"),
        ("task:hops(hop=3)", "cannot make the task"),
        ("task:hops(hops=0)", "hops: hops is 0: allowed is a whole number, at least 1"),
        ("task:brackets(kinds=true)", "kinds is True"),
        ("task:hops(symbols=40)", "no answer within 64 tokens"),
    ],
)
def test_what_is_wrong_with_a_task_is_said(source: str, said: str) -> None:
    assert said in refusal(lambda: open_source(DataSpec(source=source)))


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    spec = DataSpec(source="task:hops", vocab=5)
    assert "hops has 6 different tokens" in refusal(lambda: open_task("hops", spec))
    assert open_source(DataSpec(source="task:hops", vocab=32)).vocab == 32


# Scores


class Oracle:
    """Stands in for a model: certain of every next token, and wrong where it should be."""

    device = torch.device("cpu")

    def __init__(self, tokens: Any, vocab: int, is_wrong: Any) -> None:
        said = np.where(is_wrong, (tokens + 1) % vocab, tokens)[:, 1:]
        self.said = torch.from_numpy(said)
        self.vocab = vocab
        self.calls = 0

    def logits(self, windows_SBT: torch.Tensor) -> torch.Tensor:
        rows = windows_SBT.shape[1]
        said = self.said[self.calls : self.calls + rows]
        self.calls += rows
        one_hot = torch.nn.functional.one_hot(said.flatten(), self.vocab).float() * 20
        return one_hot.expand(windows_SBT.shape[0], -1, -1)


def test_accuracy_counts_answers_alone() -> None:
    cell = tiny_cell("keel", source="task:arithmetic", seq=32)
    engine = Engine(cell, [0], 1)
    tokens, known = engine.source.held_out(40, 32)  # type: ignore[attr-defined]
    generator = np.random.default_rng(0)
    is_wrong = generator.random(tokens.shape) < 0.25
    engine.model = Oracle(tokens, engine.source.vocab, is_wrong)  # type: ignore[assignment]
    loss, answer_loss, accuracy = score(engine, 40)
    answers, wrong = known[:, 1:], is_wrong[:, 1:]
    assert accuracy[0] == pytest.approx(1 - wrong[answers].mean())
    assert answer_loss[0] == pytest.approx(20 * wrong[answers].mean(), rel=1e-3)
    assert loss[0] == pytest.approx(20 * wrong.mean(), rel=1e-3)


def test_the_lr_is_chosen_by_loss_and_an_easy_task_is_learned() -> None:
    """One level of two kinds of brackets: the answer follows from two tokens before."""
    cell = tiny_cell("pre_ln", source="task:brackets(kinds=2, deepest=1)", batch=16, seq=24)
    (found,) = task_scores(
        [cell], (0,), lrs=[1e-6, 3e-2], schedule=Schedule(steps=60), workers=0
    )
    assert found.chance == 0.5 and found.task == "brackets(kinds=2, deepest=1)"
    assert {lane.lr for lane in found.lanes} == {1e-6, 3e-2}
    (chosen,) = found.chosen
    assert chosen.lr == 3e-2 and chosen.accuracy > 0.9
    (row,) = summary_rows([found])
    assert row["accuracy"] == chosen.accuracy and row["loss"] == chosen.loss
    assert row["accuracy_low"] is None and row["seeds"] == 1


def test_only_tasks_can_be_scored() -> None:
    assert "task with known answers" in refusal(lambda: task_scores([tiny_cell()], workers=0))


def row_of(arch: str, loss: float, accuracy: float, half: float = 0.01) -> dict[str, Any]:
    row: dict[str, Any] = {"task": "hops", "arch": arch, "depth": 4, "chance": 0.125}
    for name, value in (("loss", loss), ("accuracy", accuracy)):
        row |= {name: value, f"{name}_low": value - half, f"{name}_high": value + half}
    return row


def test_a_disagreement_needs_both_intervals_apart() -> None:
    low, high = row_of("keel", 1.0, 0.3), row_of("pre_ln", 1.2, 0.5)
    assert disagreements([high, low]) == [(low, high)]
    assert disagreements([low, row_of("pre_ln", 1.2, 0.2)]) == []
    assert disagreements([low, row_of("pre_ln", 1.01, 0.5)]) == []
    assert disagreements([low, high | {"task": "induction"}]) == []
    assert disagreements([low, high | {"loss_low": None, "loss_high": None}]) == []


def test_the_figure_has_a_panel_per_task() -> None:
    rows = [row_of("keel", 1.0, 0.3), row_of("pre_ln", 1.2, 0.5) | {"task": "induction"}]
    rows.append(row_of("post_ln", 1.0, 0.3) | {"loss": None})
    figure = task_figure(rows)
    assert isinstance(figure, Figure) and len(figure.axes) == 2
    assert "nothing to draw" in refusal(lambda: task_figure([]))

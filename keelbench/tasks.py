"""Small tasks with known answers that need depth: loss is not quality (appendix B).

Each task is a data source, ``task:induction`` or ``task:hops(hops=3)``. Its sequences hold
tokens that are free (random) and tokens that follow from those before them: the answers.
Accuracy is the share of answers that the model's most likely token gets right.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from keelbench.archs.rule import is_number, require
from keelbench.data import PROBE_SEED, TokenSource
from keelbench.errors import KeelbenchError
from keelbench.registry import Registry, parse_call
from keelbench.specs import DataSpec

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

SAMPLE_ROWS = 256
"""Sequences from which the unigram frequencies are taken."""


@dataclass(frozen=True)
class AnswerTask(ABC):
    """Generates sequences. Subclasses are frozen dataclasses; fields are its parameters."""

    title: ClassVar[str] = ""
    example: ClassVar[str] = ""

    @property
    @abstractmethod
    def vocab(self) -> int:
        """Token ids lie in [0, vocab)."""

    @property
    @abstractmethod
    def choices(self) -> int:
        """Number of tokens that can be an answer: guessing is right 1 / choices of the time."""

    @abstractmethod
    def sequence(
        self, generator: np.random.Generator, length: int
    ) -> tuple[IntArray, BoolArray]:
        """Tokens (length,), and which of them are answers."""


@dataclass(frozen=True)
class Induction(AnswerTask):
    """A block of distinct symbols, then the same again: what followed this symbol before?"""

    symbols: int = 16

    title: ClassVar[str] = "induction copy"
    example: ClassVar[str] = "d a f c | d A F C D A F C"

    def __post_init__(self) -> None:
        _require_count("induction", "symbols", self.symbols, 4)

    @property
    def vocab(self) -> int:
        return self.symbols

    @property
    def choices(self) -> int:
        return self.symbols

    def sequence(
        self, generator: np.random.Generator, length: int
    ) -> tuple[IntArray, BoolArray]:
        longest = min(self.symbols, length // 2)
        period = int(generator.integers(max(2, longest // 2), longest + 1))
        block = generator.permutation(self.symbols)[:period]
        position = np.arange(length)
        return block[position % period], position > period


@dataclass(frozen=True)
class Hops(AnswerTask):
    """A permutation written out as pairs, then queries: where do k steps from here lead?"""

    hops: int = 2
    symbols: int = 5

    title: ClassVar[str] = "k-hop lookup"
    example: ClassVar[str] = "a c b a c b : a B b C (2 hops)"

    def __post_init__(self) -> None:
        _require_count("hops", "hops", self.hops, 1)
        _require_count("hops", "symbols", self.symbols, 2)

    @property
    def vocab(self) -> int:
        return self.symbols + 1

    @property
    def choices(self) -> int:
        return self.symbols

    def sequence(
        self, generator: np.random.Generator, length: int
    ) -> tuple[IntArray, BoolArray]:
        step = generator.permutation(self.symbols)
        given = generator.permutation(self.symbols)
        target = np.arange(self.symbols)
        for _ in range(self.hops):
            target = step[target]
        asked = generator.integers(self.symbols, size=length)
        pairs = np.stack([given, step[given]], axis=1).flatten()
        queries = np.stack([asked, target[asked]], axis=1).flatten()
        tokens = np.concatenate([pairs, [self.symbols], queries])[:length]
        position = np.arange(length) - len(pairs) - 1
        return tokens, (position >= 0) & (position % 2 == 1)


@dataclass(frozen=True)
class Arithmetic(AnswerTask):
    """Chains of +, - and × modulo m, worked from left to right: what is the result?"""

    modulus: int = 5
    terms: int = 2

    title: ClassVar[str] = "modular arithmetic"
    example: ClassVar[str] = "3 + 4 = 2 (modulo 5)"

    def __post_init__(self) -> None:
        _require_count("arithmetic", "modulus", self.modulus, 2)
        _require_count("arithmetic", "terms", self.terms, 2)

    @property
    def vocab(self) -> int:
        return self.modulus + 4

    @property
    def choices(self) -> int:
        return self.modulus

    def sequence(
        self, generator: np.random.Generator, length: int
    ) -> tuple[IntArray, BoolArray]:
        size = 2 * self.terms + 1
        chains = -(-length // size)
        digits = generator.integers(self.modulus, size=(chains, self.terms))
        signs = generator.integers(3, size=(chains, self.terms - 1))
        result = digits[:, 0]
        for sign, digit in zip(signs.T, digits[:, 1:].T, strict=True):
            choice = [result + digit, result - digit, result * digit]
            result = np.choose(sign, choice) % self.modulus
        tokens = np.empty((chains, size), dtype=np.int64)
        tokens[:, 0:-2:2] = digits
        tokens[:, 1:-2:2] = self.modulus + signs
        tokens[:, -2] = self.modulus + 3
        tokens[:, -1] = result
        is_answer = np.arange(length) % size == size - 1
        return tokens.flatten()[:length], is_answer


@dataclass(frozen=True)
class Brackets(AnswerTask):
    """Nested brackets of several kinds; behind a ? stands the one that closes the innermost."""

    kinds: int = 6
    deepest: int = 12

    title: ClassVar[str] = "bracket matching"
    example: ClassVar[str] = "( [ ? ] { ? } ? )"

    def __post_init__(self) -> None:
        _require_count("brackets", "kinds", self.kinds, 2)
        _require_count("brackets", "deepest", self.deepest, 1)

    @property
    def vocab(self) -> int:
        return 2 * self.kinds + 1

    @property
    def choices(self) -> int:
        return self.kinds

    def sequence(
        self, generator: np.random.Generator, length: int
    ) -> tuple[IntArray, BoolArray]:
        tokens: list[int] = []
        answers: list[int] = []
        open_kinds: list[int] = []
        kinds = generator.integers(self.kinds, size=length).tolist()
        wants_open = (generator.random(length) < 0.5).tolist()
        for kind, opens in zip(kinds, wants_open, strict=True):
            if not open_kinds or (opens and len(open_kinds) < self.deepest):
                open_kinds.append(kind)
                tokens.append(kind)
            else:
                answers.append(len(tokens) + 1)
                tokens += [2 * self.kinds, self.kinds + open_kinds.pop()]
        is_answer = np.zeros(len(tokens), dtype=np.bool_)
        is_answer[answers] = True
        return np.array(tokens[:length]), is_answer[:length]


TASKS = Registry("task", "keelbench.tasks")
for _name, _class in {
    "induction": Induction,
    "hops": Hops,
    "arithmetic": Arithmetic,
    "brackets": Brackets,
}.items():
    TASKS.register(_name, _class)


@dataclass(frozen=True)
class TaskSource(TokenSource):
    """A task as a token source: endless, every sequence whole and from its start."""

    task: AnswerTask

    def batch(self, seed: int, step: int, batch: int, seq: int) -> IntArray:
        generator = np.random.default_rng([seed, step, 1])
        return examples(self.task, generator, batch, seq + 1)[0]

    def probe(self, batch: int, seq: int) -> IntArray:
        return self.held_out(batch, seq)[0]

    def held_out(self, batch: int, seq: int) -> tuple[IntArray, BoolArray]:
        """The fixed held-out sequences (batch, seq + 1), and which tokens are answers."""
        return examples(self.task, np.random.default_rng(PROBE_SEED), batch, seq + 1)


def examples(
    task: AnswerTask, generator: np.random.Generator, rows: int, length: int
) -> tuple[IntArray, BoolArray]:
    """Tokens (rows, length) and which of them are answers."""
    found = [task.sequence(generator, length) for _ in range(rows)]
    return np.stack([tokens for tokens, _ in found]), np.stack([known for _, known in found])


def make_task(text: str) -> AnswerTask:
    """The task behind ``induction`` or ``hops(hops=3)``.

    Raises:
        KeelbenchError: for an unknown name or parameter, or a value out of range.
    """
    name, arguments = parse_call(text)
    made = TASKS.get(name)
    try:
        task = made(**arguments)
    except TypeError as error:
        raise KeelbenchError(f"cannot make the task {text}: {error}") from error
    if not isinstance(task, AnswerTask):
        raise KeelbenchError(f"'{name}' is no task: expected a keelbench.tasks.AnswerTask")
    return task


def open_task(argument: str, spec: DataSpec) -> TaskSource:
    """The data source ``task:...``."""
    if not argument:
        known = ", ".join(TASKS.names())
        raise KeelbenchError(
            f"'{spec.source}' names no task: write task:NAME", f"known: {known}"
        )
    task = make_task(argument)
    if spec.vocab is not None and spec.vocab < task.vocab:
        raise KeelbenchError(
            f"data.vocab is {spec.vocab}: {argument} has {task.vocab} different tokens"
        )
    sample, is_answer = examples(task, np.random.default_rng(0), SAMPLE_ROWS, spec.seq + 1)
    if not is_answer[:, 1:].any():
        raise KeelbenchError(
            f"{argument} has no answer within {spec.seq} tokens", "give longer sequences (seq)"
        )
    return TaskSource(spec.source, sample.flatten(), spec.vocab or task.vocab, task)


def _require_count(task: str, name: str, value: Any, least: int) -> None:
    is_count = isinstance(value, int) and is_number(value) and value >= least
    require(is_count, task, name, value, f"a whole number, at least {least}")

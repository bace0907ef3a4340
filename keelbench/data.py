"""Token sources: seeded, reproducible, resumable by step, with a held-out part.

A batch is a pure function of (seed, step), so that every architecture sees the same data in
the same order and an interrupted run needs no data state.
"""

import hashlib
import lzma
import math
import os
import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keelbench.errors import KeelbenchError
from keelbench.registry import Registry, did_you_mean
from keelbench.specs import DataSpec

HELD_OUT = 0.05
"""Share of the tokens, at the end, that is never trained on and feeds the probe."""

PROBE_SEED = 20260119
"""Fixes the probe's windows: the same tokens for every architecture, seed and run."""

KJV_SHA256 = "31a6d37bae54fa2c1d2a47905b87321bf3521cd06cc16ab52301ce2d1a2b8f02"

KNOWN = "kjv, words, markov, text:PATH, words:PATH, tokens:PATH, hf:NAME, task:NAME"
"""What a data source may be, for people."""

Tokens = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32] | NDArray[np.int64]


@dataclass(frozen=True)
class TokenSource:
    """A sequence of token ids, split into a training part and a held-out part."""

    name: str
    tokens: Tokens
    vocab: int
    """Size of the vocabulary: ids lie in [0, vocab)."""

    @cached_property
    def unigram(self) -> NDArray[np.float64]:
        """Add-one-smoothed relative frequency of each token, shape (vocab,)."""
        counts = np.bincount(self.tokens[: self.split], minlength=self.vocab) + 1.0
        frequencies: NDArray[np.float64] = counts / counts.sum()
        return frequencies

    @property
    def unigram_entropy(self) -> float:
        """Nats per token of a model that knows the frequencies and no context."""
        return float(-(self.unigram * np.log(self.unigram)).sum())

    @property
    def split(self) -> int:
        """Index of the first held-out token."""
        return len(self.tokens) - int(len(self.tokens) * HELD_OUT)

    def batch(self, seed: int, step: int, batch: int, seq: int) -> NDArray[np.int64]:
        """Training windows for one lane and step, shape (batch, seq + 1)."""
        generator = np.random.default_rng([seed, step, 1])
        return self._windows(generator, 0, self.split, batch, seq)

    def probe(self, batch: int, seq: int) -> NDArray[np.int64]:
        """The fixed held-out windows, shape (batch, seq + 1)."""
        generator = np.random.default_rng(PROBE_SEED)
        return self._windows(generator, self.split, len(self.tokens), batch, seq)

    def unigram_loss(self, windows: NDArray[np.int64]) -> float:
        """Cross-entropy (nats) of the targets in ``windows`` under the unigram frequencies."""
        return float(-np.log(self.unigram[windows[:, 1:]]).mean())

    def _windows(
        self, generator: np.random.Generator, start: int, stop: int, batch: int, seq: int
    ) -> NDArray[np.int64]:
        starts = generator.integers(start, stop - seq, size=batch)
        windows: NDArray[np.int64] = self.tokens[starts[:, None] + np.arange(seq + 1)].astype(
            np.int64
        )
        return windows


def open_source(spec: DataSpec) -> TokenSource:
    """The tokens behind ``kjv``, ``words``, ``markov``, ``text:PATH``, ``words:PATH``,
    ``tokens:PATH``, ``hf:NAME`` or ``task:NAME``.

    Raises:
        KeelbenchError: for a missing, empty, too short or wrong-typed file, and for token
            ids outside the vocabulary: what and where.
    """
    kind, _, argument = spec.source.partition(":")
    if kind not in SOURCES.names():
        near = did_you_mean(kind, SOURCES.names())
        raise KeelbenchError(
            f"unknown data source '{spec.source}'{near}",
            f"known: {KNOWN}",
        )
    source: TokenSource = SOURCES.get(kind)(argument, spec)
    least = max(2, math.ceil((spec.seq + 2) / HELD_OUT))
    if len(source.tokens) < least:
        raise KeelbenchError(
            f"{spec.source} has {len(source.tokens):,} tokens: sequences of {spec.seq} need "
            f"at least {least:,}, since the last {HELD_OUT:.0%} are held out for the probe",
            "give a longer text or a smaller --seq",
        )
    _check_ids(source, spec)
    return source


def _check_ids(source: TokenSource, spec: DataSpec) -> None:
    largest = int(source.tokens.max())
    if largest >= source.vocab:
        where = int(np.argmax(source.tokens >= source.vocab))
        raise KeelbenchError(
            f"{spec.source}: token {where:,} is {int(source.tokens[where])}, outside the "
            f"vocabulary of {source.vocab}",
            f"set data.vocab to at least {largest + 1}",
        )


def _kjv(argument: str, spec: DataSpec) -> TokenSource:
    return _from_bytes("kjv", _bundled_text(), spec)


def _bundled_text() -> bytes:
    packed = (files("keelbench") / "text" / "kjv.txt.xz").read_bytes()
    text = lzma.decompress(packed)
    if hashlib.sha256(text).hexdigest() != KJV_SHA256:
        raise KeelbenchError("the bundled text is damaged", "install keelbench again")
    return text


WORDS = 4096
"""Words of the vocabulary unless ``data.vocab`` says otherwise: 97 % of the bundled text."""


def _words(argument: str, spec: DataSpec) -> TokenSource:
    """Words and punctuation marks of a text, by frequency; the rarest share the last id.

    The vocabulary is no larger than the text's, or its unigram entropy would be wrong.
    """
    is_bundled = spec.source == "words"
    raw = _bundled_text() if is_bundled else _existing(argument, spec).read_bytes()
    try:
        counts = Counter(words := re.findall(r"\w+|[^\w\s]", raw.decode()))
    except UnicodeDecodeError as error:
        raise KeelbenchError(
            f"{spec.source} is not UTF-8: byte {error.start:,} is {raw[error.start]:#04x}",
            "text:PATH takes any file as bytes",
        ) from None
    vocab = _at_least_two(spec.vocab or max(2, min(WORDS, len(counts) + 1)), "words")
    ids = {word: i for i, (word, _) in enumerate(counts.most_common(vocab - 1))}
    rest = len(ids)
    tokens = np.fromiter((ids.get(word, rest) for word in words), np.uint32, len(words))
    return TokenSource(spec.source, tokens, vocab)


def _at_least_two(vocab: int, kind: str) -> int:
    if vocab < 2:
        raise KeelbenchError(f"data.vocab is {vocab}: {kind} needs at least 2 tokens")
    return vocab


def _text(argument: str, spec: DataSpec) -> TokenSource:
    return _from_bytes(spec.source, _existing(argument, spec).read_bytes(), spec)


def _from_bytes(name: str, text: bytes, spec: DataSpec) -> TokenSource:
    """Bytes as tokens. Vocabulary 128 for ASCII text, 256 otherwise."""
    tokens = np.frombuffer(text, dtype=np.uint8)
    is_ascii = len(tokens) > 0 and int(tokens.max()) < 128
    return TokenSource(name, tokens, spec.vocab or (128 if is_ascii else 256))


def _existing(argument: str, spec: DataSpec) -> Path:
    kind = spec.source.partition(":")[0]
    if not argument:
        raise KeelbenchError(f"'{spec.source}' names no file: write {kind}:PATH")
    path = Path(os.path.expanduser(argument))  # noqa: PTH111 (Path's raises for ~nobody)
    origin = f"(from data source '{spec.source}')"
    try:
        if not path.exists():
            raise KeelbenchError(f"no such file: {path} {origin}")
        if not path.is_file():
            raise KeelbenchError(f"{path} is not a file {origin}")
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise KeelbenchError(f"cannot read {path}: {error.strerror} {origin}") from error
    if is_empty:
        raise KeelbenchError(f"{path} is empty {origin}")
    return path


LLMC_HEADER_INTS = 256
LLMC_FORMATS: dict[int, tuple[int, type[np.uint16 | np.uint32]]] = {
    20240520: (1, np.uint16),
    20240801: (7, np.uint32),
}
"""llm.c shards by magic number: header version and token type; 256 int32 of header, the
third of them the token count."""

NANOGPT_VOCAB = 50257
"""GPT-2's vocabulary: what nanoGPT's headerless uint16 files and llm.c's v1 shards hold."""


def _tokens(argument: str, spec: DataSpec) -> TokenSource:
    path = _existing(argument, spec)
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=3) if size >= 12 else np.zeros(3, "<i4")
    if int(header[0]) in LLMC_FORMATS:
        tokens = _llmc_shard(path, size, header)
    else:
        if size % 2:
            raise KeelbenchError(
                f"{path} has {size} bytes, an odd number: neither a llm.c shard (no magic "
                "number) nor headerless uint16",
                "for plain text write text:PATH",
            )
        tokens = np.memmap(path, dtype="<u2", mode="r")
    largest = int(tokens.max()) if len(tokens) else 0
    return TokenSource(spec.source, tokens, spec.vocab or max(NANOGPT_VOCAB, largest + 1))


def _llmc_shard(path: Path, size: int, header: NDArray[np.int32]) -> Tokens:
    version, kind = LLMC_FORMATS[int(header[0])]
    count, offset = int(header[2]), 4 * LLMC_HEADER_INTS
    if int(header[1]) != version:
        raise KeelbenchError(
            f"{path}: llm.c shard with magic {header[0]} has version {header[1]}, "
            f"expected {version}"
        )
    held = max(0, size - offset) // np.dtype(kind).itemsize
    if held != count:
        raise KeelbenchError(
            f"{path}: the header promises {count:,} tokens, the file holds {held:,}",
            "the file may be truncated: fetch it again",
        )
    shard: Tokens = np.memmap(path, dtype=kind, mode="r", offset=offset, shape=(count,))
    return shard


MARKOV_STATES = 64
MARKOV_TOKENS = 1 << 20


def _markov(argument: str, spec: DataSpec) -> TokenSource:
    """Synthetic tokens from a first-order chain whose entropies are known in closed form."""
    vocab = _at_least_two(spec.vocab or MARKOV_STATES, "markov")
    transition = markov_transition(vocab)
    generator = np.random.default_rng(0)
    thresholds = transition.cumsum(axis=1).tolist()
    draws = generator.random(MARKOV_TOKENS).tolist()
    tokens = np.empty(MARKOV_TOKENS, dtype=np.int64)
    state = 0
    for i, draw in enumerate(draws):
        state = min(bisect_left(thresholds[state], draw), vocab - 1)
        tokens[i] = state
    return TokenSource(spec.source, tokens, vocab)


def markov_transition(vocab: int) -> NDArray[np.float64]:
    """Row-stochastic transition matrix, (vocab, vocab): a fixed Dirichlet(0.1) draw per row."""
    generator = np.random.default_rng(1)
    rows: NDArray[np.float64] = generator.dirichlet(np.full(vocab, 0.1), size=vocab)
    rows += 1e-4
    rows /= rows.sum(axis=1, keepdims=True)
    return rows


def markov_entropies(vocab: int) -> tuple[float, float]:
    """(unigram entropy, entropy of a token given the one before) in nats, in closed form."""
    transition = markov_transition(vocab)
    values, vectors = np.linalg.eig(transition.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    stationary = stationary / stationary.sum()
    unigram = -(stationary * np.log(stationary)).sum()
    conditional = -(stationary[:, None] * transition * np.log(transition)).sum()
    return float(unigram), float(conditional)


def _hf(argument: str, spec: DataSpec) -> TokenSource:
    """UTF-8 bytes of the ``text`` column of a Hugging Face dataset's training split."""
    if not argument:
        raise KeelbenchError("'hf:' names no dataset: write hf:NAME")
    try:
        import datasets
    except ImportError:
        raise KeelbenchError(
            f"data source '{spec.source}' needs the package datasets",
            "install it with: pip install 'keelbench[hf]'",
        ) from None
    try:
        rows = datasets.load_dataset(argument, split="train")
    except Exception as error:
        raise KeelbenchError(f"cannot load dataset '{argument}': {error}") from error
    if "text" not in rows.column_names:
        raise KeelbenchError(
            f"dataset '{argument}' has no column 'text': it has {', '.join(rows.column_names)}"
        )
    return _from_bytes(spec.source, "\n".join(rows["text"]).encode(), spec)


SOURCES = Registry("data source", "keelbench.data")
for _name, _open in {
    "kjv": _kjv,
    "words": _words,
    "markov": _markov,
    "text": _text,
    "tokens": _tokens,
    "hf": _hf,
    "task": "keelbench.tasks:open_task",
}.items():
    SOURCES.register(_name, _open)

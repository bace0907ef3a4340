"""Token sources: reproducible, disjoint from what is held out, and clear about bad files."""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import refusal

from keelbench.data import (
    HELD_OUT,
    KJV_SHA256,
    TokenSource,
    markov_entropies,
    markov_transition,
    open_source,
)
from keelbench.specs import DataSpec

TEXT = b"In the beginning God created the heaven and the earth. " * 40


def spec(source: str, seq: int = 8, vocab: int | None = None) -> DataSpec:
    return DataSpec(source=source, seq=seq, vocab=vocab)


def opened(source: str, seq: int = 8, vocab: int | None = None) -> TokenSource:
    return open_source(spec(source, seq, vocab))


def shard(magic: int, version: int, tokens: np.ndarray, count: int | None = None) -> bytes:
    """An llm.c shard: 256 int32 of header, then the tokens."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + tokens.tobytes()


IDS = np.arange(1000) % 300


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write_file(content: bytes) -> Path:
        path = tmp_path / "a file.bin"
        path.write_bytes(content)
        return path

    return write_file


@pytest.fixture(scope="module")
def kjv() -> TokenSource:
    return opened("kjv")


@pytest.fixture(scope="module")
def markov() -> TokenSource:
    return opened("markov")


# kjv


def test_kjv_is_the_text_that_it_claims_to_be(kjv: TokenSource) -> None:
    assert hashlib.sha256(kjv.tokens.tobytes()).hexdigest() == KJV_SHA256
    assert len(kjv.tokens) == 4_236_033
    assert len(np.unique(kjv.tokens)) == 73
    assert kjv.vocab == 128


def test_kjv_has_the_known_unigram_entropy(kjv: TokenSource) -> None:
    assert kjv.unigram_entropy == pytest.approx(3.0695, abs=0.01)
    assert kjv.unigram_loss(kjv.probe(64, 64)) == pytest.approx(3.0695, abs=0.1)


# Batches


def test_a_batch_is_a_function_of_seed_and_step(kjv: TokenSource) -> None:
    first = kjv.batch(seed=1, step=5, batch=3, seq=8)
    assert first.shape == (3, 9)
    assert first.dtype == np.int64
    assert np.array_equal(first, opened("kjv").batch(seed=1, step=5, batch=3, seq=8))
    assert not np.array_equal(first, kjv.batch(seed=1, step=6, batch=3, seq=8))
    assert not np.array_equal(first, kjv.batch(seed=2, step=5, batch=3, seq=8))


def test_windows_are_stretches_of_the_text(kjv: TokenSource) -> None:
    text = kjv.tokens.tobytes()
    for window in kjv.batch(seed=0, step=0, batch=4, seq=16):
        assert bytes(window.tolist()) in text


def test_the_probe_is_always_the_same_tokens(kjv: TokenSource) -> None:
    assert np.array_equal(kjv.probe(4, 16), opened("kjv").probe(4, 16))


def test_training_never_sees_what_is_held_out() -> None:
    """On a source whose tokens are their positions, over every place a window can start."""
    count, seq = 200, 8
    source = TokenSource("positions", np.arange(count), count)
    assert source.split == count - count * HELD_OUT == 190
    trained = source.batch(seed=0, step=0, batch=20_000, seq=seq)
    probed = source.probe(20_000, seq)
    assert set(np.unique(trained)) == set(range(190)), "all of the training part is used"
    assert set(np.unique(probed)) == set(range(190, 200)), "all of the held-out part is used"
    assert np.all(np.diff(trained, axis=1) == 1)


def test_unigram_frequencies_leave_out_what_is_held_out() -> None:
    tokens = np.concatenate([np.zeros(95, dtype=np.int64), np.ones(5, dtype=np.int64)])
    source = TokenSource("steps", tokens, 2)
    assert source.unigram.tolist() == [96 / 97, 1 / 97]
    assert source.unigram_loss(np.array([[0, 0, 0]])) == pytest.approx(-math.log(96 / 97))
    assert source.unigram_loss(np.array([[0, 1, 1]])) == pytest.approx(math.log(97))


# markov


def test_markov_has_the_entropies_of_its_closed_form(markov: TokenSource) -> None:
    unigram, conditional = markov_entropies(64)
    assert conditional < unigram < math.log(64)
    assert markov.vocab == 64
    assert markov.unigram_entropy == pytest.approx(unigram, abs=0.004)
    pairs = np.zeros((64, 64))
    np.add.at(pairs, (markov.tokens[:-1], markov.tokens[1:]), 1.0)
    frequencies = pairs / pairs.sum()
    given = frequencies / frequencies.sum(axis=1, keepdims=True)
    seen = frequencies > 0
    empirical = -(frequencies[seen] * np.log(given[seen])).sum()
    assert empirical == pytest.approx(conditional, abs=0.004)


def test_markov_rows_are_distributions_of_the_asked_size() -> None:
    transition = markov_transition(5)
    assert transition.shape == (5, 5)
    assert np.allclose(transition.sum(axis=1), 1)
    assert np.all(transition > 0)


def test_markov_needs_two_tokens() -> None:
    assert "data.vocab is 1: markov needs at least 2" in refusal(
        lambda: opened("markov", vocab=1)
    )


def test_words_are_numbered_by_frequency(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("The cat, the d\u00f6g, the cat. " * 200, encoding="utf-8")
    found = opened(f"words:{path}", vocab=8)
    # the and cat and the comma twice per repeat; The, d\u00f6g, the full stop once
    assert len(found.tokens) == 9 * 200 and found.vocab == 8
    assert set(found.tokens[[1, 2, 3]].tolist()) == {0, 1, 2}
    assert found.tokens[3] == found.tokens[6] and found.tokens[1] == found.tokens[7]
    assert found.tokens[2] == found.tokens[5]
    assert len(set(found.tokens[:9].tolist())) == 6


def test_rare_words_share_the_last_token(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a a a b b " * 200 + "c d e " * 5, encoding="utf-8")
    found = opened(f"words:{path}", vocab=3)
    assert found.tokens[:5].tolist() == [0, 0, 0, 1, 1]
    assert set(found.tokens[-15:].tolist()) == {2}


def test_the_bundled_words_have_the_known_unigram_entropy() -> None:
    found = opened("words")
    assert found.vocab == 4096 and len(found.tokens) == 950_965
    assert (found.tokens == 4095).mean() == pytest.approx(0.0253, abs=1e-3)
    assert found.unigram_entropy == pytest.approx(5.73, abs=0.02)


def test_a_small_text_has_no_more_words_than_it_has(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be " * 200, encoding="utf-8")
    found = opened(f"words:{path}")
    assert found.vocab == 5
    shares = np.array([2, 2, 1, 1]) / 6
    assert found.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum(), abs=0.02)
    path.write_text("a " * 800, encoding="utf-8")
    assert opened(f"words:{path}").unigram_entropy == pytest.approx(0, abs=0.02)


def test_words_are_read_from_text_alone(write: Callable[[bytes], Path]) -> None:
    message = refusal(lambda: opened(f"words:{write(b'abc ' * 300 + bytes([255]))}"))
    assert "is not UTF-8: byte 1,200 is 0xff" in message and "text:PATH" in message
    assert "names no file" in refusal(lambda: opened("words:"))


def test_words_need_two_tokens() -> None:
    assert "words needs at least 2 tokens" in refusal(lambda: opened("words", vocab=1))


# text:PATH


def test_ascii_text_has_128_tokens_and_anything_else_256(
    write: Callable[[bytes], Path],
) -> None:
    source = opened(f"text:{write(TEXT)}")
    assert (source.vocab, source.tokens.tobytes()) == (128, TEXT)
    assert opened(f"text:{write(TEXT + 'é'.encode())}").vocab == 256
    assert opened(f"text:{write(TEXT)}", vocab=1000).vocab == 1000


def test_a_home_folder_may_be_abbreviated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "book.txt").write_bytes(TEXT)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(opened("text:~/book.txt").tokens) == len(TEXT)


# tokens:PATH


def test_nanogpt_files_are_headerless_uint16(write: Callable[[bytes], Path]) -> None:
    source = opened(f"tokens:{write(IDS.astype('<u2').tobytes())}")
    assert source.vocab == 50257
    assert source.tokens.tolist() == IDS.tolist()
    assert np.array_equal(source.batch(0, 0, 2, 8), source.batch(0, 0, 2, 8))


def test_a_larger_id_widens_the_default_vocabulary(write: Callable[[bytes], Path]) -> None:
    ids = np.append(IDS, 60_000).astype("<u2")
    assert opened(f"tokens:{write(ids.tobytes())}").vocab == 60_001


@pytest.mark.parametrize(
    ("magic", "version", "kind"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")]
)
def test_llmc_shards_are_told_by_their_magic_number(
    write: Callable[[bytes], Path], magic: int, version: int, kind: str
) -> None:
    path = write(shard(magic, version, IDS.astype(kind)))
    source = opened(f"tokens:{path}")
    assert source.tokens.tolist() == IDS.tolist()
    assert source.tokens.dtype == np.dtype(kind)


def test_uint32_ids_may_exceed_16_bits(write: Callable[[bytes], Path]) -> None:
    ids = np.append(IDS, 128_255).astype("<u4")
    assert opened(f"tokens:{write(shard(20240801, 7, ids))}").vocab == 128_256


# What can be wrong

BAD_FILES: dict[str, tuple[str, bytes, list[str]]] = {
    "empty text": ("text", b"", ["is empty"]),
    "empty tokens": ("tokens", b"", ["is empty"]),
    "short text": (
        "text",
        TEXT[:150],
        ["has 150 tokens", "sequences of 8 need at least 200", "smaller --seq"],
    ),
    "short tokens": ("tokens", bytes(100), ["has 50 tokens"]),
    "odd bytes": (
        "tokens",
        bytes(1001),
        ["has 1001 bytes, an odd number", "headerless uint16", "text:PATH"],
    ),
    "truncated shard": (
        "tokens",
        shard(20240520, 1, IDS.astype("<u2"), count=2000),
        ["the header promises 2,000 tokens, the file holds 1,000", "truncated"],
    ),
    "overlong shard": (
        "tokens",
        shard(20240801, 7, IDS.astype("<u4"), count=10),
        ["the header promises 10 tokens, the file holds 1,000"],
    ),
    "header cut off": (
        "tokens",
        shard(20240520, 1, IDS.astype("<u2"))[:500],
        ["the header promises 1,000 tokens, the file holds 0"],
    ),
    "wrong version": (
        "tokens",
        shard(20240520, 7, IDS.astype("<u2")),
        ["magic 20240520 has version 7, expected 1"],
    ),
    "shard without tokens": (
        "tokens",
        shard(20240520, 1, IDS[:0].astype("<u2")),
        ["has 0 tokens"],
    ),
}


@pytest.mark.parametrize("case", list(BAD_FILES))
def test_a_bad_file_is_refused_with_what_and_where(
    write: Callable[[bytes], Path], case: str
) -> None:
    kind, content, said = BAD_FILES[case]
    path = write(content)
    message = refusal(lambda: opened(f"{kind}:{path}"))
    for part in (str(path), *said):
        assert part in message, message


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_ids_outside_the_vocabulary_are_located(
    write: Callable[[bytes], Path], kind: str
) -> None:
    content = TEXT if kind == "text" else IDS.astype("<u2").tobytes()
    tokens = np.frombuffer(content, dtype=np.uint8 if kind == "text" else "<u2")
    first = int(np.argmax(tokens >= 100))
    message = refusal(lambda: opened(f"{kind}:{write(content)}", vocab=100))
    assert f"token {first:,} is {tokens[first]}, outside the vocabulary of 100" in message
    assert f"set data.vocab to at least {tokens.max() + 1}" in message


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_a_path_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    missing = refusal(lambda: opened(f"{kind}:{tmp_path}/nowhere.txt"))
    assert f"no such file: {tmp_path}/nowhere.txt" in missing
    assert f"{tmp_path} is not a file" in refusal(lambda: opened(f"{kind}:{tmp_path}"))
    assert f"'{kind}:' names no file: write {kind}:PATH" in refusal(lambda: opened(f"{kind}:"))
    assert "no such file" in refusal(lambda: opened(f"{kind}:~nobody-of-this-name/x"))
    long = "x" * 5000
    assert "cannot read" in refusal(lambda: opened(f"{kind}:{long}"))


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_a_file_that_may_not_be_read_is_refused(
    open_folder: Path, unprivileged: None, kind: str
) -> None:
    closed = open_folder / "closed"
    closed.mkdir()
    (closed / "book.txt").write_bytes(TEXT)
    (closed / "book.txt").chmod(0)
    path = f"{kind}:{closed}/book.txt"
    assert f"cannot read {closed}/book.txt: Permission denied" in refusal(lambda: opened(path))
    closed.chmod(0)
    assert f"cannot read {closed}/book.txt: Permission denied" in refusal(lambda: opened(path))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("kjw", ["unknown data source 'kjw'", "did you mean 'kjv'?", "text:PATH"]),
        ("book.txt", ["unknown data source 'book.txt'", "known: kjv, words, markov"]),
        ("", ["unknown data source ''"]),
        ("hf:", ["'hf:' names no dataset"]),
    ],
)
def test_an_unknown_source_is_refused(source: str, said: list[str]) -> None:
    message = refusal(lambda: opened(source))
    assert all(part in message for part in said), message


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    message = refusal(lambda: opened("hf:some/dataset"))
    assert "needs the package datasets" in message
    assert "pip install 'keelbench[hf]'" in message


def test_sequences_longer_than_the_held_out_part_are_refused(kjv: TokenSource) -> None:
    longest = int(len(kjv.tokens) * HELD_OUT) - 2
    assert opened("kjv", seq=longest).probe(1, longest).shape == (1, longest + 1)
    assert "smaller --seq" in refusal(lambda: opened("kjv", seq=longest + 40))

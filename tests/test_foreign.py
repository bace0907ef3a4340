"""A model of the user's own: the same ramp, and what the user holds stays as it was."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import by_seed, numbers, refusal, tiny_cell
from torch import Tensor, nn

from keelbench.engine import Engine
from keelbench.foreign import ForeignEngine, open_engine
from keelbench.foreign_model import ForeignModel
from keelbench.ramp import run_ramp
from keelbench.specs import CellSpec, ModelSpec

Factory = Callable[..., nn.Module]


class Small(nn.Module):
    """A causal model: an embedding, a running mean, dropout and a batch-norm-like buffer."""

    def __init__(self, vocab: int, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.mix = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocab, bias=False)
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        x = self.embedding(tokens)
        steps = torch.arange(1, tokens.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + self.dropout(torch.tanh(self.mix(x.cumsum(dim=1) / steps)))
        logits: Tensor = self.head(x * self.frozen)
        return logits


def cell(**settings: Any) -> CellSpec:
    return tiny_cell("keel", **{"source": "markov", "vocab": 24, **settings})


def engine(build: Factory | nn.Module, seeds: Sequence[int] = (0,), **settings: Any) -> Any:
    return ForeignEngine(cell(**settings), seeds, 20, build=build)


def lrs(steps: int, lanes: int, lr: float = 1e-2) -> np.ndarray[Any, Any]:
    return np.full((steps, lanes), lr)


def trace(found: ForeignEngine) -> tuple[Any, ...]:
    return found.losses().tolist(), found.grad_norms().tolist(), found.probes()[1].tolist()


# What it computes


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_a_lane_is_trained_as_a_plain_torch_loop_would(clip: float) -> None:
    lane = engine(Small, (3,), clip=clip)
    torch.manual_seed(3)
    module = Small(vocab=24)
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01
    )
    expected = []
    for step in range(6):
        windows = torch.from_numpy(lane.source.batch(3, step, 2, 16))
        logits = module(windows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, clip or 1e9)
        optimizer.step()
        expected.append((loss.item(), norm.item()))
    lane.advance(lrs(6, 1))
    assert lane.losses()[:, 0] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert lane.grad_norms()[:, 0] == pytest.approx([norm for _, norm in expected], rel=1e-4)
    ours = dict(lane.model.modules[0].named_parameters())
    for name, parameter in module.named_parameters():
        assert torch.allclose(ours[name], parameter, atol=1e-5), name


def test_keelbenchs_own_model_as_a_module_gives_the_same_trace() -> None:
    """A lane wrapped as the user's module: every loss and norm agrees with the engine."""
    own = Engine(cell(), [5], 20, is_fused=False)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = Engine(cell(), [5], 1, is_fused=False).model
            self.inner = [inner]
            self.flat = nn.Parameter(inner.flat_SP.detach().clone()[0])

        def forward(self, tokens: Tensor) -> Tensor:
            (inner,) = self.inner
            inner.flat_SP = self.flat[None]
            return inner.logits(tokens[None])[0].view(*tokens.shape, -1)

    theirs = engine(Wrapped, (5,))
    own.advance(lrs(8, 1, 3e-3))
    theirs.advance(lrs(8, 1, 3e-3))
    assert theirs.losses() == pytest.approx(own.losses(), rel=1e-5)
    assert theirs.grad_norms() == pytest.approx(own.grad_norms(), rel=1e-4)
    assert theirs.probes()[0].tolist() == own.probes()[0].tolist()
    assert theirs.probes()[1] == pytest.approx(own.probes()[1], rel=1e-5)
    assert theirs.unigram_entropy == own.unigram_entropy


def test_lanes_do_not_see_each_other_even_with_dropout() -> None:
    def build(vocab: int) -> nn.Module:
        return Small(vocab, dropout=0.3)

    both = engine(build, (0, 1))
    both.advance(lrs(6, 2))
    for position, seed in enumerate((0, 1)):
        alone = engine(build, (seed,))
        alone.advance(lrs(6, 1))
        assert alone.losses()[:, 0].tolist() == both.losses()[:, position].tolist()


def test_probing_does_not_move_a_lanes_random_state() -> None:
    class Noisy(Small):
        def forward(self, tokens: Tensor) -> Tensor:
            logits = super().forward(tokens)
            noise: Tensor = logits + 0.1 * torch.randn(logits.shape)
            return noise

    often, once = engine(Noisy, probe_every=1), engine(Noisy, probe_every=100)
    for lane in (often, once):
        lane.advance(lrs(5, 1))
    assert often.losses().tolist() == once.losses().tolist()


def test_a_dropped_lane_leaves_the_others_as_they_were() -> None:
    kept, whole = engine(Small, (0, 1, 2)), engine(Small, (0, 1, 2))
    kept.advance(lrs(4, 3))
    kept.keep([0, 2])
    kept.advance(lrs(4, 2))
    whole.advance(lrs(8, 3))
    assert kept.seeds == [0, 2] and kept.lanes == 2 and kept.steps == 8
    assert kept.losses().tolist() == whole.losses()[:, [0, 2]].tolist()
    assert kept.grad_norms().tolist() == whole.grad_norms()[:, [0, 2]].tolist()
    assert kept.probes()[1].tolist() == whole.probes()[1][:, [0, 2]].tolist()


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_every_optimizer_trains_a_foreign_model(name: str) -> None:
    lane = engine(Small, **{"optim.name": name})
    lane.advance(lrs(5, 1, 1e-2))
    assert np.isfinite(lane.losses()).all()
    assert lane.losses()[-1] != lane.losses()[0]


def test_muon_leaves_embedding_and_head_to_adamw() -> None:
    kinds = {tensor.name: tensor.kind for tensor in engine(Small).model.tensors}
    assert kinds["embedding.weight"] == "embedding" and kinds["mix.weight"] == "matrix"
    assert "head" in kinds and kinds["mix.bias"] == "vector" and "frozen" not in kinds


def test_tied_weights_stay_tied() -> None:
    class Tied(Small):
        def __init__(self, vocab: int) -> None:
            super().__init__(vocab)
            self.head.weight = self.embedding.weight

    lane = engine(Tied)
    lane.advance(lrs(3, 1))
    (module,) = lane.model.modules
    assert module.head.weight is module.embedding.weight
    assert torch.isfinite(module.head.weight).all()


# What it leaves alone


@pytest.fixture
def mine() -> Iterator[Small]:
    torch.manual_seed(11)
    module = Small(24, dropout=0.2)
    module.mix.eval()
    yield module


def test_the_users_module_is_left_as_it_was_found(mine: Small) -> None:
    state = {name: value.clone() for name, value in mine.state_dict().items()}
    modes = [part.training for part in mine.modules()]
    lane = engine(lambda: mine, (0, 1))
    lane.advance(lrs(4, 2))
    assert all(torch.equal(value, state[name]) for name, value in mine.state_dict().items())
    assert [part.training for part in mine.modules()] == modes
    assert all(parameter.grad is None for parameter in mine.parameters())
    assert lane.model.modules[0].calls.item() == 4
    assert [part.training for part in lane.model.modules[0].modules()] == modes
    assert lane.losses()[0, 0] != lane.losses()[0, 1]


def test_a_module_may_be_given_in_place_of_a_factory(mine: Small) -> None:
    lane = engine(mine)
    lane.advance(lrs(2, 1))
    assert mine.calls.item() == 0
    assert not torch.equal(lane.model.modules[0].mix.weight, mine.mix.weight)


def test_global_random_states_do_not_move() -> None:
    def build(vocab: int) -> nn.Module:
        random.random()
        np.random.rand()
        return Small(vocab, dropout=0.5)

    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    lane = engine(build, (0, 1))
    lane.advance(lrs(3, 2))
    lane.probes()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]
    assert random.getstate() == before[2]


# How it is asked for


MODULE = """
import torch
from torch import nn

class Bigram(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.table = nn.Embedding(vocab, vocab)

    def forward(self, tokens):
        return self.table(tokens)

def build(vocab, seed, **others):
    assert set(others) == {"seq", "depth", "width"} and seed in (0, 1)
    return Bigram(vocab)

def no_module():
    return 3

def broken():
    raise ValueError("no weights")

def wrong_shape():
    return nn.Embedding(24, 7)

def few_symbols():
    return Bigram(7)

def future(vocab):
    class Future(Bigram):
        def forward(self, tokens):
            return self.table(tokens) + self.table(tokens).mean(dim=1, keepdim=True)
    return Future(vocab)
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MODULE)
    return path


def test_a_ramp_over_a_users_model_gives_records(user_file: Path) -> None:
    asked = cell(module=f"{user_file}:build", peak=4e-2, lr_multiplier=30.0)
    records = by_seed(run_ramp(asked, [0, 1]))
    assert set(records) == {0, 1}
    assert records[0].cell.model.module == f"{user_file}:build"
    assert records[0].trace.steps and numbers(records[0].trace) != numbers(records[1].trace)
    assert records[0].id != by_seed(run_ramp(cell(), [0]))[0].id


def test_cells_without_a_module_get_lanes(user_file: Path) -> None:
    assert isinstance(open_engine(cell(), [0], 1), Engine)
    asked = cell(module=f"{user_file}:build")
    assert isinstance(open_engine(asked, [0], 1), ForeignEngine)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("biuld", "did you mean 'build'?"),
        ("no_module", "the factory returned int"),
        ("broken", "could not be built: ValueError: no weights"),
        ("wrong_shape", "returns (1, 16, 7) for tokens (1, 16): expected logits"),
        ("few_symbols", "the model fails on tokens (1, 16) in [0, "),
        ("future", "the model is not causal"),
    ],
)
def test_what_is_wrong_with_a_users_model_is_said(
    user_file: Path, name: str, said: str
) -> None:
    asked = cell(module=f"{user_file}:{name}")
    assert said in refusal(lambda: open_engine(asked, [0], 1))


def test_models_that_cannot_be_trained_are_refused() -> None:
    def frozen(vocab: int) -> nn.Module:
        return Small(vocab).requires_grad_(False)

    def mixed(vocab: int) -> nn.Module:
        module = Small(vocab)
        module.mix.double()
        return module

    assert "no trainable parameter" in refusal(lambda: engine(frozen))
    assert "several types" in refusal(lambda: engine(mixed))
    sizes = iter((16, 8))
    other = refusal(lambda: engine(lambda vocab: Small(vocab, next(sizes)), (0, 1)))
    assert "different sizes" in other


def test_bfloat16_runs_under_autocast() -> None:
    model = ForeignModel(ModelSpec(), Small, 24, 16, [0], is_autocast=True)
    windows = torch.randint(24, (1, 2, 17), generator=torch.Generator().manual_seed(0))
    plain = ForeignModel(ModelSpec(), Small, 24, 16, [0])
    assert model.losses(windows) == pytest.approx(plain.losses(windows), rel=2e-2)
    assert model.losses(windows) != plain.losses(windows)
    assert model.flat_SP.dtype == torch.float32

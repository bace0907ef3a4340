"""The C step equals the plain path, and steps aside where it must."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ALL_RULES, losses_and_gradients, make_model, random_tokens, stirred

from keelbench.archs import ResidualRule, make_rule
from keelbench.cuda_graph import WARM_UP, GraphedCall
from keelbench.engine import Engine
from keelbench.native import library
from keelbench.native.trace import UntraceableError, trace
from keelbench.specs import CellSpec, DataSpec, ModelSpec

SIX = ("post_ln", "deepnorm", "hybridnorm", "mix_ln", "pre_ln", "keel")

pytestmark = pytest.mark.skipif(
    library.problem() is not None, reason=f"no C kernels: {library.problem()}"
)


def cell(arch: str, **more: object) -> CellSpec:
    model = ModelSpec(arch=arch, depth=8, width=32)
    return replace(CellSpec(model=model, data=DataSpec(batch=4, seq=32)), **more).validated()


def ramp(arch: str, seeds: list[int], steps: int = 50, is_fused: bool | None = None) -> Engine:
    engine = Engine(cell(arch), seeds, steps, is_fused=is_fused)
    lrs = 2e-5 * np.arange(1, steps + 1)
    engine.advance(np.repeat(lrs[:, None], len(seeds), axis=1))
    return engine


@pytest.mark.parametrize("arch", SIX)
def test_losses_over_50_steps_equal_those_of_the_plain_path(arch: str) -> None:
    fast, plain = ramp(arch, [0, 1]), ramp(arch, [0, 1], is_fused=False)
    assert np.abs(fast.losses() - plain.losses()).max() < 1e-3
    assert np.abs(fast.probes()[1] - plain.probes()[1]).max() < 1e-3
    assert np.allclose(fast.grad_norms(), plain.grad_norms(), rtol=2e-2)


@pytest.mark.parametrize("arch", SIX)
def test_a_lanes_bits_do_not_depend_on_its_neighbours(arch: str) -> None:
    together = ramp(arch, [0, 1, 2], steps=12)
    for lane in range(3):
        alone = ramp(arch, [lane], steps=12)
        assert np.array_equal(alone.losses()[:, 0], together.losses()[:, lane])
        assert np.array_equal(alone.grad_norms()[:, 0], together.grad_norms()[:, lane])
        assert torch.equal(alone.model.flat_SP[0], together.model.flat_SP[lane])


def test_a_lane_goes_on_bit_by_bit_after_its_neighbours_have_been_dropped() -> None:
    together, alone = (ramp("keel", seeds, steps=6) for seeds in ([3, 4], [4]))
    for engine in (together, alone):
        engine._log_2TS = torch.zeros(2, 12, engine.lanes)
    together.keep([1])
    for engine in (together, alone):
        engine.advance(np.full((6, 1), 1e-3))
    assert np.array_equal(together.losses()[6:], alone.losses()[6:])


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 3, 17), (2, 5, 70), (1, 2, 300)])
def test_any_shape_of_windows_gives_the_plain_gradients(shape: tuple[int, int, int]) -> None:
    lanes, batch, seq = shape
    windows = random_tokens(lanes, batch=batch, length=seq + 1)
    results = [
        losses_and_gradients(
            stirred(make_model("keel", seeds=range(lanes), is_fused=is_fused)), windows
        )
        for is_fused in (True, False)
    ]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_losses_of_two_batches_can_be_differentiated_together() -> None:
    windows = [random_tokens(seed=seed) for seed in (0, 1)]
    grads = []
    for is_fused in (True, False):
        model = stirred(make_model("pre_ln", is_fused=is_fused))
        total = sum(3 * model.losses(w).sum() for w in windows)
        grads.append(torch.autograd.grad(total, model.flat_SP)[0])
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


def test_training_steps_and_autograd_agree_and_leave_old_gradients_alone() -> None:
    model, windows = stirred(make_model("keel")), random_tokens()
    losses = model.losses(windows)
    losses.sum().backward()
    first = model.flat_SP.grad
    assert first is not None
    model.flat_SP.grad = None
    assert torch.equal(model.train_losses(windows), losses.detach())
    assert model.flat_SP.grad is not first and torch.equal(model.flat_SP.grad, first)


def test_divergence_shows_as_nan_in_its_own_lane_only() -> None:
    model = make_model("keel", seeds=(0, 1), dtype=torch.float32)
    with torch.no_grad():
        model.flat_SP[1] = float("nan")
    losses = model.train_losses(random_tokens(2))
    assert model.flat_SP.grad is not None
    assert losses[0].isfinite() and model.flat_SP.grad[0].isfinite().all()
    assert losses[1].isnan()


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    model = make_model("keel")
    windows = random_tokens()
    windows[0, 0, 0] = model.vocab
    with pytest.raises(IndexError, match="token ids"):
        model.train_losses(windows)


@pytest.mark.parametrize("arch", ALL_RULES)
def test_every_rule_either_traces_or_runs_under_autograd(arch: str) -> None:
    rule = make_rule(arch)
    try:
        operations = trace(ModelSpec(arch=arch, depth=4, width=16), rule, is_training=True)
    except UntraceableError:
        assert arch.partition("(")[0] not in SIX
    else:
        assert operations[0].kind == "embed" and operations[-1].kind == "head"


@dataclass(frozen=True)
class Detaching(ResidualRule):
    """Uses what stand-ins do not have, and a branch that the gradient does not see."""

    is_hidden: bool = False

    def norm_slots(self, site: object) -> tuple[str, ...]:
        return ("in",)

    def step(self, x, branch, norms, site):  # type: ignore[no-untyped-def]
        if self.is_hidden:
            with torch.no_grad():
                y = branch(norms["in"](x))
            return x + y
        return x + branch(norms["in"](x.detach()))


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_rule_that_keeps_a_part_from_the_gradient_is_not_traced(is_hidden: bool) -> None:
    with pytest.raises(UntraceableError):
        trace(ModelSpec(depth=4, width=16).resolved(), Detaching(is_hidden), is_training=True)


def test_without_a_compiler_the_plain_path_runs_and_says_why(tmp_path: Path) -> None:
    code = (
        "from keelbench.native.library import describe\n"
        "from keelbench.archs import make_rule\n"
        "from keelbench.model import LaneModel\n"
        "from keelbench.specs import ModelSpec\n"
        "spec = ModelSpec(depth=2, width=8)\n"
        "print(describe('cpu', 'float32'), LaneModel(spec, make_rule('keel'), 5, [0]).is_fused)"
    )
    environment = {
        "CC": "no-such-compiler",
        "XDG_CACHE_HOME": str(tmp_path),
        "PATH": "/usr/bin",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    assert done.stdout.strip() == ("plain: no C compiler (cc, or the one named in CC) False")


def test_a_failing_compiler_is_reported_by_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho first >&2\necho 'no such flag' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(library.NativeUnavailableError, match="no such flag"):
        library._compiled("float")
    assert not list((tmp_path / "keelbench").iterdir())


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(("arch", "kinds"), [("keel", 2), ("pre_ln", 1), ("mix_ln", 2)])
def test_blocks_compile_without_graph_breaks_and_once_per_kind(arch: str, kinds: int) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    windows = random_tokens()
    model = stirred(make_model(arch, depth=16, is_fused=False))
    expected = losses_and_gradients(model, windows)
    model.compile_blocks(backend="aot_eager")
    for ours, theirs in zip(losses_and_gradients(model, windows), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    assert counters["stats"]["unique_graphs"] == kinds
    assert not counters["graph_break"]


def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_why() -> None:
    seen: list[float] = []
    call = GraphedCall(lambda x: seen.append(float(x)))
    for value in range(WARM_UP + 2):
        call(torch.tensor(float(value)))
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert call.problem is not None and call.problem.startswith("no CUDA graph: ")
    call.reset()
    assert call.problem is None

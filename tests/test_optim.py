"""Lane optimizers against torch's own optimizers, run lane by lane and tensor by tensor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    assert_close,
    by_name,
    make_model,
    random_floats,
    refusal,
    stirred,
    tiny_cell,
)
from torch import Tensor

from keelbench.engine import Engine
from keelbench.model import LaneModel
from keelbench.optim import LaneOptimizer
from keelbench.specs import OptimSpec

EXACT = 1e-12
LRS = (1e-3, 3e-2, 0.0)
"""One per lane."""


class LaneByLane:
    """The reference: every lane a model of its own, clipped and stepped by torch."""

    def __init__(self, model: LaneModel, spec: OptimSpec) -> None:
        self.model, self.spec = model, spec
        kinds = {tensor.name: tensor.kind for tensor in model.tensors}
        self.lanes: list[dict[str, Tensor]] = []
        self.optimizers = []
        for lane in range(model.lanes):
            params = {
                name: part[lane].detach().clone().requires_grad_()
                for name, part in model.weights().items()
            }
            groups = [
                {"params": [param], "scale": self.scale(kinds[name])}
                for name, param in params.items()
            ]
            self.lanes.append(params)
            self.optimizers.append(self.make(groups))

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if self.spec.name == "sgd":
            return torch.optim.SGD(
                groups, momentum=self.spec.beta1, weight_decay=self.spec.weight_decay
            )
        return torch.optim.AdamW(
            groups,
            betas=(self.spec.beta1, self.spec.beta2),
            eps=self.spec.eps,
            weight_decay=self.spec.weight_decay,
        )

    def scale(self, kind: str) -> float:
        is_scaled = self.spec.lr_scaling == "mup" and kind != "matrix"
        return self.model.spec.width / 1024 if is_scaled else 1.0

    def step(self, grad_SP: Tensor, lrs: Sequence[float]) -> Tensor:
        norms = []
        for lane, (params, optimizer) in enumerate(
            zip(self.lanes, self.optimizers, strict=True)
        ):
            for name, grad in by_name(self.model, grad_SP).items():
                params[name].grad = grad[lane].clone()
            limit = self.spec.clip or float("inf")
            norms.append(torch.nn.utils.clip_grad_norm_(list(params.values()), limit))
            for group in optimizer.param_groups:
                group["lr"] = lrs[lane] * group["scale"]
            optimizer.step()
        return torch.stack(norms)

    def keep(self, lanes: Sequence[int]) -> None:
        self.lanes = [self.lanes[lane] for lane in lanes]
        self.optimizers = [self.optimizers[lane] for lane in lanes]

    def flat(self) -> Tensor:
        rows = [torch.cat([p.flatten() for p in params.values()]) for params in self.lanes]
        return torch.stack(rows)


def gradients(model: LaneModel, step: int) -> Tensor:
    """Gradients whose norms lie on both sides of 1: clipping acts on lane 1 alone."""
    grad = random_floats(*model.flat_SP.shape, seed=step, dtype=model.flat_SP.dtype)
    sizes = torch.tensor([0.4, 50.0, 0.9][: model.lanes], dtype=grad.dtype)
    return grad / torch.linalg.vector_norm(grad, dim=1, keepdim=True) * sizes[:, None]


def advance(
    model: LaneModel, ours: LaneOptimizer, grad: Tensor, lrs: Sequence[float]
) -> Tensor:
    model.flat_SP.grad = grad.clone()
    ours.set_lrs(lrs)
    return ours.step()


CASES = {
    "default": OptimSpec(),
    "no clipping": OptimSpec(clip=0.0),
    "tight clipping": OptimSpec(clip=0.1),
    "strong decay": OptimSpec(weight_decay=0.5),
    "no decay": OptimSpec(weight_decay=0.0),
    "other betas and eps": OptimSpec(beta1=0.5, beta2=0.999, eps=1e-3),
    "mup": OptimSpec(lr_scaling="mup"),
    "sgd": OptimSpec(name="sgd"),
    "sgd, mup, decay": OptimSpec(name="sgd", lr_scaling="mup", weight_decay=0.1, beta1=0.0),
}


@pytest.mark.parametrize("case", list(CASES))
def test_every_lane_is_clipped_and_stepped_as_torch_would(case: str) -> None:
    spec = CASES[case]
    model = stirred(make_model(seeds=(0, 1, 2)))
    ours, theirs = LaneOptimizer(model, spec), LaneByLane(model, spec)
    start = theirs.flat()
    for step in range(5):
        lrs = [lr * (step + 1) for lr in LRS]
        grad = gradients(model, step)
        norms = advance(model, ours, grad, lrs)
        assert_close(norms, theirs.step(grad, lrs), EXACT)
        assert_close(norms, torch.tensor([0.4, 50.0, 0.9]), 1e-6)
        assert_close(model.flat_SP, theirs.flat(), EXACT)
    assert not torch.equal(model.flat_SP[0], start[0])
    assert torch.equal(model.flat_SP[2], start[2]), "at LR 0 nothing moves"


def test_float32_weights_follow_torch_to_rounding() -> None:
    model = stirred(make_model(seeds=(0, 1, 2), dtype=torch.float32))
    ours, theirs = LaneOptimizer(model, OptimSpec()), LaneByLane(model, OptimSpec())
    for step in range(5):
        grad = gradients(model, step)
        advance(model, ours, grad, LRS)
        theirs.step(grad, LRS)
    assert_close(model.flat_SP, theirs.flat(), 1e-6)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_momentum_moves_with_its_lane_when_others_are_dropped(name: str) -> None:
    spec = OptimSpec(name=name)
    dropped, whole = (stirred(make_model(seeds=(0, 1, 2))) for _ in range(2))
    ours, reference = LaneOptimizer(dropped, spec), LaneOptimizer(whole, spec)
    for step in range(6):
        grad = gradients(whole, step)
        if step == 2:
            dropped.keep([1, 2])
            ours.keep([1, 2])
        kept = grad if step < 2 else grad[1:]
        lrs = (1e-3, 3e-2, 2e-3)
        advance(dropped, ours, kept, lrs if step < 2 else lrs[1:])
        advance(whole, reference, grad, lrs)
    assert torch.equal(dropped.flat_SP, whole.flat_SP[1:])


def test_after_dropping_lanes_adamw_still_equals_torch() -> None:
    model = stirred(make_model(seeds=(0, 1, 2)))
    ours, theirs = LaneOptimizer(model, OptimSpec()), LaneByLane(model, OptimSpec())
    for step, lanes in enumerate(([0, 1, 2], [0, 2], [1])):
        for part in (model, ours, theirs):
            if step:
                part.keep(lanes)
        grad = gradients(model, step)
        lrs = LRS[: model.lanes]
        advance(model, ours, grad, lrs)
        theirs.step(grad, lrs)
        assert_close(model.flat_SP, theirs.flat(), EXACT)


def test_dropping_lanes_before_the_first_step_is_allowed() -> None:
    model = stirred(make_model(seeds=(0, 1)))
    ours = LaneOptimizer(model, OptimSpec())
    model.keep([1])
    ours.keep([1])
    before = model.flat_SP.detach().clone()
    advance(model, ours, gradients(model, 0), [1e-2])
    assert not torch.equal(model.flat_SP, before)


def test_muon_steps_hidden_matrices_by_muon_and_the_rest_by_adamw() -> None:
    spec = OptimSpec(name="muon")
    model = stirred(make_model(dtype=torch.float32))
    ours, adamw = LaneOptimizer(model, spec), LaneByLane(model, spec)
    weight = model.weights()["0.attention.out"][0].detach().clone().requires_grad_()
    muon = torch.optim.Muon(
        [weight],
        lr=3e-3,
        momentum=spec.beta1,
        weight_decay=spec.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(3):
        grad = gradients(model, step)
        advance(model, ours, grad, [3e-3])
        adamw.step(grad, [3e-3])
        weight.grad = by_name(model, grad)["0.attention.out"][0].clone()
        muon.step()
    weights, rest = model.weights(), by_name(model, adamw.flat())
    assert_close(weights["0.attention.out"][0], weight, 1e-6)
    for name in ("embedding", "head", "0.attention.norm_in"):
        assert_close(weights[name], rest[name], 1e-6)
    assert not torch.allclose(weights["1.ffn.down"], rest["1.ffn.down"], atol=1e-3)


@pytest.mark.parametrize(("name", "lr"), [("adamw", 1e-2), ("sgd", 0.3), ("muon", 1e-2)])
def test_every_optimizer_learns(name: str, lr: float) -> None:
    engine = Engine(tiny_cell("pre_ln", **{"optim.name": name}), [0, 1], 30)
    engine.advance(np.full((30, 2), lr))
    losses = engine.losses()
    assert np.all(losses[-3:].mean(axis=0) < losses[0] - 1.0), losses[[0, -1]]


OWN = """
import torch

def plain_sgd(groups, spec):
    return [torch.optim.SGD(groups, lr=0.0)]

def broken(groups, spec):
    raise RuntimeError("no such device")
"""


def test_an_optimizer_of_ones_own_gets_every_tensor_in_its_shape(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    model = stirred(make_model(seeds=(0, 1)))
    before, grad = model.flat_SP.detach().clone(), gradients(model, 0)
    ours = LaneOptimizer(model, OptimSpec(name=f"{file}:plain_sgd", clip=0.0))
    shapes = {segment.name: segment.shape for segment in ours.segments}
    assert shapes["embedding"] == (19, 16)
    assert shapes["0.attention.qkv"] == (16, 32)
    assert shapes["0.attention.norm_in"] == (16,)
    advance(model, ours, grad, [0.1, 0.2])
    assert_close(
        model.flat_SP, before - torch.tensor([[0.1], [0.2]], dtype=torch.float64) * grad, EXACT
    )


def test_what_is_wrong_with_an_optimizer_is_said(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    model = make_model()
    message = refusal(lambda: LaneOptimizer(model, OptimSpec(name="adamv")))
    assert "unknown optimizer 'adamv'" in message and "did you mean 'adamw'?" in message
    message = refusal(lambda: LaneOptimizer(model, OptimSpec(name=f"{file}:broken")))
    assert "could not be made: RuntimeError: no such device" in message
    assert "a factory takes (groups, OptimSpec)" in message


WRONG = """
import torch

def nothing(groups, spec):
    return []

def single(groups, spec):
    return torch.optim.SGD(groups, lr=0.0)

def words(groups, spec):
    return ["sgd"]

def rebuilt(groups, spec):
    return [torch.optim.SGD([{"params": group["params"]} for group in groups], lr=0.0)]

def half(groups, spec):
    return [torch.optim.SGD(groups[1:], lr=0.0)]

def twice(groups, spec):
    return [torch.optim.SGD(groups, lr=0.0), torch.optim.SGD(groups, lr=0.0)]
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "covers 0 of"),
        ("single", "the factory returns SGD, not a list"),
        ("words", "the factory returns str among the optimizers"),
        ("rebuilt", "leaves out the key 'segment'"),
        ("half", "parameter groups"),
        ("twice", "parameter groups"),
    ],
)
def test_an_optimizer_that_misses_weights_is_refused(
    name: str, said: str, tmp_path: Path
) -> None:
    """Weights without an optimizer would look like an architecture that never learns."""
    file = tmp_path / "own.py"
    file.write_text(WRONG)
    spec = OptimSpec(name=f"{file}:{name}")
    message = refusal(lambda: LaneOptimizer(make_model(), spec))
    assert said in message and "a factory takes (groups, OptimSpec)" in message

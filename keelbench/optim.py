"""One torch optimizer per lane over the lanes' flat storage, and clipping per lane.

Each lane's step is exactly ``clip_grad_norm_`` followed by the optimizer's own ``step``, so
whatever torch's optimizers do is what a lane gets. For elementwise optimizers a lane's
weights are one long vector: one fused kernel instead of hundreds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from keelbench.errors import KeelbenchError
from keelbench.layout import TensorLayout
from keelbench.model import LaneModel
from keelbench.specs import OPTIMIZERS, PAPER_WIDTH, OptimSpec

CLIP_EPS = 1e-6
"""Added to the norm before dividing, as in ``torch.nn.utils.clip_grad_norm_``."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a lane's flat weights that one optimizer parameter covers."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    is_matrix: bool
    lr_scale: float
    """Multiplies the ramp's LR for this segment (``optim.lr_scaling``)."""

    def view(self, row_P: Tensor) -> Tensor:
        return row_P[self.start : self.stop].view(self.shape)


Group = dict[str, Any]
Factory = Callable[[list[Group], OptimSpec], list[Optimizer]]
"""Makes one lane's optimizers from parameter groups with keys params, lr and segment.

The keys must stay in the groups (torch's optimizers keep them). A factory whose attribute
``is_elementwise`` is true gets its parameters merged into long vectors.
"""


def segments(tensors: Sequence[TensorLayout], spec: OptimSpec, width: int) -> list[Segment]:
    """The finest cut: one segment per tensor, 2-D where the tensor is a matrix."""
    cut, offset = [], 0
    for tensor in tensors:
        is_matrix = tensor.kind == "matrix"
        scale = 1.0 if is_matrix or spec.lr_scaling == "none" else width / PAPER_WIDTH
        shape = (tensor.size,) if tensor.kind == "vector" else (tensor.rows, tensor.columns)
        stop = offset + tensor.size
        cut.append(Segment(tensor.name, offset, stop, shape, is_matrix, scale))
        offset = stop
    return cut


def merged(cut: Sequence[Segment]) -> list[Segment]:
    """Neighbours with the same LR as one vector: enough for an elementwise optimizer."""
    runs = []
    for scale, run in groupby(cut, key=lambda segment: segment.lr_scale):
        first, *rest = run
        stop = rest[-1].stop if rest else first.stop
        size = stop - first.start
        runs.append(Segment(first.name, first.start, stop, (size,), False, scale))
    return runs


class LaneOptimizer:
    """Clips and steps every lane of a model at its own LR."""

    def __init__(self, model: LaneModel, spec: OptimSpec, *, capturable: bool = False) -> None:
        self.model = model
        self.spec = spec
        factory: Factory = OPTIMIZERS.get(spec.name)
        cut = segments(model.tensors, spec, model.spec.width)
        is_elementwise = getattr(factory, "is_elementwise", False)
        self.segments = merged(cut) if is_elementwise else cut
        self._capturable = capturable
        self._lanes = [self._make_lane(lane, factory) for lane in range(model.lanes)]

    def _make_lane(self, lane: int, factory: Factory) -> list[Optimizer]:
        row = self.model.flat_SP.detach()[lane]
        groups: list[Group] = [
            {
                "params": [segment.view(row)],
                "lr": torch.zeros((), device=row.device) if self._capturable else 0.0,
                "segment": segment,
            }
            for segment in self.segments
        ]
        hint = "a factory takes (groups, OptimSpec) and returns a list of torch optimizers"
        try:
            made = factory(groups, self.spec)
        except KeelbenchError:
            raise
        except Exception as error:
            raise KeelbenchError(
                f"optimizer '{self.spec.name}' could not be made: "
                f"{type(error).__name__}: {error}",
                hint,
            ) from error
        if problem := _problem(made, len(self.segments)):
            raise KeelbenchError(f"optimizer '{self.spec.name}' {problem}", hint)
        return list(made)

    def set_lrs(self, lrs: Sequence[float]) -> None:
        """Fill in each lane's LR; in place for captured graphs."""
        for optimizers, lr in zip(self._lanes, lrs, strict=True):
            for group in self._groups(optimizers):
                scaled = lr * group["segment"].lr_scale
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(scaled)
                else:
                    group["lr"] = scaled

    def step(self) -> Tensor:
        """Clip and update every lane; returns the gradient norms before clipping, (S,)."""
        grad_SP = self.model.flat_SP.grad
        assert grad_SP is not None
        norms = torch.stack([torch.linalg.vector_norm(row) for row in grad_SP])
        if self.spec.clip:
            factors = (self.spec.clip / (norms + CLIP_EPS)).clamp(max=1.0)
            grad_SP.mul_(factors[:, None])
        for lane, optimizers in enumerate(self._lanes):
            for group in self._groups(optimizers):
                (param,) = group["params"]
                param.grad = group["segment"].view(grad_SP[lane])
            for optimizer in optimizers:
                optimizer.step()
        return norms

    def keep(self, lanes: Sequence[int]) -> None:
        """Follow ``LaneModel.keep``: the optimizer state moves with its lane."""
        self._lanes = [self._lanes[lane] for lane in lanes]
        for row, optimizers in zip(self.model.flat_SP.detach(), self._lanes, strict=True):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    (old,) = group["params"]
                    new = group["segment"].view(row)
                    group["params"] = [new]
                    optimizer.state[new] = optimizer.state.pop(old, {})

    def _groups(self, optimizers: list[Optimizer]) -> list[Group]:
        return [group for optimizer in optimizers for group in optimizer.param_groups]


def _problem(made: Any, segments: int) -> str | None:
    """What is wrong with the answer of a factory; None if every weight has its optimizer."""
    if not isinstance(made, list | tuple):
        return f"could not be made: the factory returns {type(made).__name__}, not a list"
    others = [type(one).__name__ for one in made if not isinstance(one, Optimizer)]
    if others:
        return f"could not be made: the factory returns {others[0]} among the optimizers"
    groups = [group for optimizer in made for group in optimizer.param_groups]
    if any("segment" not in group or len(group["params"]) != 1 for group in groups):
        return (
            "leaves out the key 'segment' of its groups, or merges groups: pass them on whole"
        )
    named = [group["segment"].name for group in groups]
    if len(named) != segments or len(set(named)) != segments:
        return f"covers {len(set(named))} of {segments} parameter groups, {len(named)} times"
    return None


def adamw(groups: list[Group], spec: OptimSpec) -> list[Optimizer]:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), torch's fused kernel."""
    is_tensor_lr = isinstance(groups[0]["lr"], Tensor)
    optimizer = torch.optim.AdamW(
        groups,
        lr=groups[0]["lr"],
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        fused=True,
        capturable=is_tensor_lr,
    )
    return [optimizer]


def sgd(groups: list[Group], spec: OptimSpec) -> list[Optimizer]:
    """SGD with momentum ``beta1`` and torch's coupled weight decay."""
    return [
        torch.optim.SGD(
            groups, lr=0.0, momentum=spec.beta1, weight_decay=spec.weight_decay, fused=True
        )
    ]


def muon(groups: list[Group], spec: OptimSpec) -> list[Optimizer]:
    """Muon on hidden matrices, AdamW on embedding, head and vectors (Jordan et al. 2024).

    Updates are rescaled to AdamW's RMS, so that the LR means the same for both parts.
    """
    hidden = [g for g in groups if g["segment"].is_matrix and g["segment"].name != "head"]
    rest = [g for g in groups if not any(g is h for h in hidden)]
    first = torch.optim.Muon(
        hidden,
        lr=0.0,
        momentum=spec.beta1,
        weight_decay=spec.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [first, *adamw(rest, spec)]


adamw.is_elementwise = True  # type: ignore[attr-defined]
sgd.is_elementwise = True  # type: ignore[attr-defined]

"""Why it breaks: gradients, activations and updates of every sub-layer against depth.

What flows back through one sub-layer x <- N(α·x + F(x)) has two parts: through the shortcut,
multiplied by α / rms(α·x + F(x)), and through the branch. The paper's closed forms are about
the shortcut alone, so the shortcut's gradient is measured on its own as well (branches count
as constants) and stands beside its prediction from the measured branch variance.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keelbench.engine import Engine
from keelbench.errors import KeelbenchError
from keelbench.launch import Event, Task
from keelbench.layout import TensorLayout
from keelbench.observe import Observed, Passage, ShortcutOnly, mean_square
from keelbench.parallel import run_tasks
from keelbench.ramp import CHUNK, Progress, ramp_lrs
from keelbench.search import threads
from keelbench.shortcut import predicted_shortcut
from keelbench.specs import CellSpec

FloatArray = NDArray[np.float64]

FIRST_FITTED = 2
"""Site at which the fit of the decay starts: the first block reads raw embeddings, and some
rules make an exception of it."""

LEAST_FITTED = 4
"""Sites that a fit needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteMeasure:
    """One sub-layer; geometric means over the seeds. None where a value is not finite."""

    index: int
    branch: str
    trunk_rms: float | None
    """RMS of the trunk behind the site."""
    branch_rms: float | None
    ratio: float | None
    """Branch to trunk: RMS of the branch over RMS of the trunk that it is added to."""
    trunk_grad: float | None
    """Norm of the loss's gradient with respect to the trunk behind the site."""
    relative_grad: float | None
    """The same times the trunk's RMS: what a relative change of the trunk does to the loss."""
    shortcut_grad: float | None
    """Norm of the gradient that arrives through shortcuts alone, 1 at the last site."""
    predicted_shortcut: float | None
    """The closed form of it, from the measured branch variances; None if there is none."""
    weight_grad: float | None
    update_ratio: float | None
    """Norm of one update over the norm of the weights, matrices only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One cell, measured after ``step`` steps of its ramp."""

    cell: CellSpec
    arch: str
    depth: int
    width: int
    step: int
    lr: float
    """LR of the update whose size is measured."""
    seeds: tuple[int, ...]
    loss: float | None
    first_to_last: float | None
    """Relative gradient at the first sub-layer over that at the last."""
    decay: float | None
    """Fitted factor per sub-layer of the relative gradient on its way to the input."""
    shortcut_decay: float | None
    """The same of the shortcut's gradient."""
    predicted_decay: float | None
    """The same of its closed form, from the measured branch variances."""
    bound_decay: float | None
    """The closed form with branches as large as the trunk: the paper's bound."""
    sites: tuple[SiteMeasure, ...]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def gradient_profiles(
    cells: Sequence[CellSpec],
    seeds: Sequence[int] = (0,),
    *,
    at: int = 0,
    workers: int | None = None,
    on_event: Callable[[Event], None] = lambda _: None,
) -> list[Profile]:
    """Measure every cell at init (``at`` = 0) or after so many steps of its ramp.

    Raises:
        KeelbenchError: if a ramp is not that long.
    """
    for cell in cells:
        most = cell.validated().ramp.steps
        if at >= most:
            raise KeelbenchError(
                f"step {at} is not on the ramp of {cell.model.arch} at width "
                f"{cell.model.width}: it ends after {most} steps"
            )
    tasks = [
        Task(
            cell=cell.validated(),
            seeds=tuple(seeds),
            target="keelbench.gradients:profile_cell",
            options={"at": at},
        )
        for cell in sorted(cells, key=lambda cell: -cell.model.depth)
    ]
    profiles: list[Profile] = run_tasks(tasks, workers, on_event=on_event)
    order = {(cell.model.arch, cell.model.depth): k for k, cell in enumerate(cells)}
    return sorted(profiles, key=lambda profile: order[profile.arch, profile.depth])


SUMMARY = (
    "arch",
    "depth",
    "width",
    "step",
    "loss",
    "first_to_last",
    "decay",
    "shortcut_decay",
    "predicted_decay",
    "bound_decay",
)


def summary_rows(profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """One row per cell: the table."""
    return [{name: getattr(profile, name) for name in SUMMARY} for profile in profiles]


def profile_cell(
    cell: CellSpec,
    seeds: Sequence[int],
    *,
    at: int = 0,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Iterator[Profile]:
    """The profile of one cell: what a worker runs."""
    with threads(cell.threads):
        engine = Engine(cell, seeds, at + 1)
        lrs = ramp_lrs(cell, 0, at + 1)
        for start in range(0, at, CHUNK):
            engine.advance(_columns(lrs[start : min(start + CHUNK, at)], engine.lanes))
            loss = float(engine.losses()[-1].mean())
            on_progress(
                Progress(
                    step=engine.steps,
                    lr=float(lrs[engine.steps - 1]),
                    loss=loss,
                    running=engine.lanes,
                    lanes=engine.lanes,
                    seconds=0.0,
                )
            )
        yield _profile(engine, seeds, at, float(lrs[at]))


def _profile(engine: Engine, seeds: Sequence[int], at: int, lr: float) -> Profile:
    rule, model = engine.model.rule, engine.cell.model
    loss, passages, weight_grad = _backward(engine, Observed(rule))
    trunk_grad, trunk_rms, ratio, branch_rms = _activations(passages)
    _, through, _ = _backward(engine, Observed(ShortcutOnly(rule)))
    shortcut = _activations(through)[0]
    shortcut = shortcut / shortcut[-1]
    columns = {
        "trunk_rms": trunk_rms,
        "branch_rms": branch_rms,
        "ratio": ratio,
        "trunk_grad": trunk_grad,
        "relative_grad": trunk_grad * trunk_rms,
        "shortcut_grad": shortcut,
        "weight_grad": weight_grad,
        "update_ratio": _update_ratio(engine, lr),
    }
    predicted = predicted_shortcut(rule, *_squares(passages))
    ones = np.ones((model.depth, 1))
    bound = predicted_shortcut(rule, ones, ones)
    relative = columns["relative_grad"]
    return Profile(
        cell=engine.cell,
        arch=model.arch,
        depth=model.depth,
        width=model.width,
        step=at,
        lr=lr,
        seeds=tuple(seeds),
        loss=_finite(float(loss.mean())),
        first_to_last=_finite(float(geometric(relative[:1] / relative[-1:])[0])),
        decay=fitted_decay(geometric(relative)),
        shortcut_decay=fitted_decay(geometric(shortcut)),
        predicted_decay=fitted_decay(predicted),
        bound_decay=fitted_decay(bound),
        sites=_sites(columns, predicted),
    )


def _sites(
    columns: dict[str, FloatArray], predicted: FloatArray | None
) -> tuple[SiteMeasure, ...]:
    means = {name: geometric(values).tolist() for name, values in columns.items()}
    depth = len(next(iter(means.values())))
    return tuple(
        SiteMeasure(
            index=index,
            branch="ffn" if index % 2 else "attention",
            predicted_shortcut=None if predicted is None else _finite(float(predicted[index])),
            **{name: _finite(values[index]) for name, values in means.items()},
        )
        for index in range(depth)
    )


def _backward(
    engine: Engine, observed: Observed
) -> tuple[FloatArray, list[Passage], FloatArray]:
    """Losses (S,), passages, and norms of the weights' gradients (sites, S), on the probe."""
    model, data = engine.model, engine.cell.data
    probe = torch.from_numpy(engine.source.probe(data.probe_batch, data.seq)).to(model.device)
    plain = model.rule
    model.rule = observed
    try:
        model.flat_SP.grad = None
        losses = model.losses(probe.expand(model.lanes, *probe.shape))
        losses.sum().backward()
        grad_SP = model.flat_SP.grad
        assert grad_SP is not None
        norms = site_norms(model.tensors, grad_SP, model.spec.depth)
    finally:
        model.rule = plain
        model.flat_SP.grad = None
    return losses.detach().double().cpu().numpy(), observed.passages, norms


def _activations(
    passages: Sequence[Passage],
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Trunk gradient, trunk RMS, branch-to-trunk ratio and branch RMS, each (sites, S)."""
    grads = torch.stack([_gradient_norm(passage.after) for passage in passages])
    after = torch.stack([mean_square(passage.after) for passage in passages])
    before = torch.stack([passage.trunk_square_SN for passage in passages])
    branch = torch.stack([passage.branch_square_SN for passage in passages])
    rms = [part.mean(dim=-1).sqrt() for part in (after, before, branch)]
    arrays = [part.double().cpu().numpy() for part in (grads, rms[0], rms[2] / rms[1], rms[2])]
    return arrays[0], arrays[1], arrays[2], arrays[3]


def _squares(passages: Sequence[Passage]) -> tuple[FloatArray, FloatArray]:
    """Mean squares of trunk and branch, (sites, tokens of all lanes)."""
    trunk = torch.stack([passage.trunk_square_SN.flatten() for passage in passages])
    branch = torch.stack([passage.branch_square_SN.flatten() for passage in passages])
    return trunk.double().cpu().numpy(), branch.double().cpu().numpy()


def _gradient_norm(tensors: tuple[Tensor, ...]) -> Tensor:
    """Norm of the gradients of a site's trunk, all streams together, per lane (S,)."""
    squares = [
        tensor.grad.double().square().sum(dim=(1, 2))
        if tensor.grad is not None
        else torch.zeros(tensor.shape[0], dtype=torch.float64, device=tensor.device)
        for tensor in tensors
    ]
    return torch.stack(squares).sum(dim=0).sqrt()


def site_norms(
    tensors: Sequence[TensorLayout],
    flat_SP: Tensor,
    depth: int,
    *,
    matrices_only: bool = False,
) -> FloatArray:
    """Norm of each site's part of a flat tensor, (sites, S)."""
    squares = torch.zeros(depth, flat_SP.shape[0], dtype=torch.float64)
    parts = flat_SP.detach().split([tensor.size for tensor in tensors], dim=1)
    for tensor, part in zip(tensors, parts, strict=True):
        site = tensor.name.partition(".")[0]
        if site.isdecimal() and (tensor.kind == "matrix" or not matrices_only):
            squares[int(site)] += part.double().square().sum(dim=1).cpu()
    return squares.sqrt().numpy()


def _update_ratio(engine: Engine, lr: float) -> FloatArray:
    """Take one training step and compare the weights, (sites, S)."""
    model = engine.model
    before = model.flat_SP.detach().clone()
    engine.advance(np.full((1, engine.lanes), lr))
    change = model.flat_SP.detach() - before
    depth = model.spec.depth
    moved = site_norms(model.tensors, change, depth, matrices_only=True)
    return moved / site_norms(model.tensors, before, depth, matrices_only=True)


def fitted_decay(values: FloatArray | None) -> float | None:
    """exp of minus the slope of ln(values) against the site: the factor per sub-layer that a
    gradient takes on its way to the input. None with too few sites or a value of 0."""
    if values is None or len(values) < FIRST_FITTED + LEAST_FITTED:
        return None
    fitted = values[FIRST_FITTED:]
    if not (np.isfinite(fitted).all() and (fitted > 0).all()):
        return None
    slope = np.polyfit(np.arange(len(fitted)), np.log(fitted), 1)[0]
    return _finite(math.exp(-slope))


def geometric(values: FloatArray) -> FloatArray:
    """Geometric mean over the last axis; 0 and non-finite values stay what they are."""
    with np.errstate(divide="ignore", invalid="ignore"):
        means: FloatArray = np.exp(np.log(values).mean(axis=-1))
    return means


def _columns(lrs: FloatArray, lanes: int) -> FloatArray:
    return np.repeat(lrs[:, None], lanes, axis=1)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

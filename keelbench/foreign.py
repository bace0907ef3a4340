"""Bring your own model: any module from tokens (B, T) to logits (B, T, V), one per lane.

``ForeignEngine`` trains such modules as ``Engine`` trains lanes, so ramp, detector, records
and gate are the same. What the user holds is left as it was found: every lane is a deep copy,
and neither torch's, numpy's nor Python's global random state moves.
"""

import contextlib
import copy
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from keelbench.data import TokenSource, open_source
from keelbench.engine import TORCH_DTYPES, Engine
from keelbench.errors import KeelbenchError
from keelbench.layout import Kind, Piece, TensorLayout
from keelbench.optim import LaneOptimizer
from keelbench.registry import load_object
from keelbench.specs import CellSpec, ModelSpec

FloatArray = NDArray[np.float64]

GIVEN = ("vocab", "seq", "depth", "width", "seed")
"""What a factory may ask for by the names of its parameters."""


def open_engine(
    cell: CellSpec,
    seeds: Sequence[int],
    capacity: int,
    *,
    source: TokenSource | None = None,
) -> Engine:
    """The engine of a cell: its own lanes, or the user's modules if ``model.module`` is set.

    A ``ForeignEngine`` is no subclass, but has the interface that ramps and searches use.
    """
    if cell.model.module is None:
        return Engine(cell, seeds, capacity, source=source)
    return cast(Engine, ForeignEngine(cell, seeds, capacity, source=source))


class ForeignModel:
    """One module per lane, their trainable weights side by side in ``flat_SP``.

    Each parameter of a module is a view into its lane's row, and so is its gradient, so that
    the lane optimizer works on the modules without knowing them.

    Args:
        spec: depth and width describe the module in records; nothing is built from them.
        build: a factory, or a module that every lane gets a copy of.
        vocab: size of the vocabulary V.
        seq: tokens per sequence T.
        seeds: torch, numpy and Python are seeded with it while the factory runs.
        device: where the modules live.
        dtype: of weights; None leaves it as the factory made it.
        is_autocast: run forward passes under bfloat16 autocast.
    """

    def __init__(
        self,
        spec: ModelSpec,
        build: Callable[..., nn.Module] | nn.Module,
        vocab: int,
        seq: int,
        seeds: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        is_autocast: bool = False,
    ) -> None:
        self.spec = spec
        self.vocab = vocab
        self.device = torch.device(device)
        self.is_autocast = is_autocast
        self._rngs = [_Rng(seed, self.device) for seed in seeds]
        self.modules = []
        for seed, rng in zip(seeds, self._rngs, strict=True):
            with rng.in_place():
                given = dict(
                    zip(GIVEN, (vocab, seq, spec.depth, spec.width, seed), strict=True)
                )
                self.modules.append(_made(build, given).to(device=self.device, dtype=dtype))
        self.tensors = _tensors(self.modules[0], vocab)
        rows = [_flat(module) for module in self.modules]
        if len({row.shape for row in rows}) > 1:
            raise KeelbenchError(
                "the factory gives models of different sizes to different lanes"
            )
        self._attach(torch.stack(rows))
        self._check(seq)

    @property
    def lanes(self) -> int:
        return len(self.modules)

    def keep(self, lanes: Sequence[int]) -> None:
        """Drop every lane but these; the others' weights and losses are not affected."""
        self.modules = [self.modules[lane] for lane in lanes]
        self._rngs = [self._rngs[lane] for lane in lanes]
        self._attach(self.flat_SP[list(lanes)].clone())

    def train_losses(self, windows_SBT: Tensor) -> Tensor:
        """Losses (S,), in nats; leaves the gradient of their sum in ``flat_SP.grad``."""
        assert self.flat_SP.grad is not None
        self.flat_SP.grad.zero_()
        losses = []
        for module, rng, windows_BT in zip(self.modules, self._rngs, windows_SBT, strict=True):
            with rng.in_place():
                loss = self._loss(module, windows_BT)
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    @torch.no_grad()
    def losses(self, windows_SBT: Tensor) -> Tensor:
        """Losses (S,) in evaluation mode; modes and random states are put back."""
        losses = []
        for module, rng, windows_BT in zip(self.modules, self._rngs, windows_SBT, strict=True):
            with rng.in_place(is_kept=False), _evaluating(module):
                losses.append(self._loss(module, windows_BT))
        return torch.stack(losses)

    def _loss(self, module: nn.Module, windows_BT: Tensor) -> Tensor:
        logits_BTV = self._logits(module, windows_BT[:, :-1])
        targets = windows_BT[:, 1:].flatten()
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets)

    def _logits(self, module: nn.Module, tokens_BT: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_autocast):
            logits = module(tokens_BT)
        expected = (*tokens_BT.shape, self.vocab)
        if not isinstance(logits, Tensor) or logits.shape != expected:
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise KeelbenchError(
                f"the model returns {found} for tokens {tuple(tokens_BT.shape)}: expected "
                f"logits (B, T, V) = {expected}",
                "let the factory take vocab, or wrap the model so that it returns logits",
            )
        return logits

    def _attach(self, flat_SP: Tensor) -> None:
        """Make every parameter and gradient of the modules a view into these rows."""
        self.flat_SP = flat_SP
        self.flat_SP.grad = torch.zeros_like(flat_SP)
        for module, row, grad in zip(
            self.modules, self.flat_SP, self.flat_SP.grad, strict=True
        ):
            offset = 0
            for parameter in _trainable(module).values():
                stop = offset + parameter.numel()
                parameter.data = row[offset:stop].view(parameter.shape)
                parameter.grad = grad[offset:stop].view(parameter.shape)
                offset = stop

    @torch.no_grad()
    def _check(self, seq: int) -> None:
        """Refuse a model that sees the future: its loss would mean nothing."""
        tokens = torch.arange(seq, device=self.device)[None] % self.vocab
        changed = tokens.clone()
        changed[0, -1] = (changed[0, -1] + 1) % self.vocab
        module, rng = self.modules[0], self._rngs[0]
        with _evaluating(module):
            found = []
            for given in (tokens, changed):
                with rng.in_place(is_kept=False):
                    found.append(self._logits(module, given)[0, :-1].float())
        if seq > 1 and not torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-4):
            raise KeelbenchError(
                "the model is not causal: logits change with a later token",
                "mask attention so that position t sees tokens 0 to t only",
            )


class ForeignEngine:
    """Trains the user's modules; see ``Engine``, whose interface it has.

    Args:
        cell: a validated cell; ``model.module`` names the factory unless ``build`` is given.
        seeds: one per lane: weights and data order.
        capacity: as in ``Engine``; not needed here.
        build: the factory, or a module that every lane gets a copy of.
    """

    def __init__(
        self,
        cell: CellSpec,
        seeds: Sequence[int],
        capacity: int,
        *,
        source: TokenSource | None = None,
        build: Callable[..., nn.Module] | nn.Module | None = None,
    ) -> None:
        self.cell = cell
        self.seeds = list(seeds)
        self.source = source or open_source(cell.data)
        self.model = ForeignModel(
            cell.model,
            build or load_object(cell.model.module or ""),
            self.source.vocab,
            cell.data.seq,
            seeds,
            device=cell.device,
            dtype=torch.float64 if cell.dtype == "float64" else None,
            is_autocast=TORCH_DTYPES[cell.dtype] == torch.bfloat16,
        )
        self.optimizer = LaneOptimizer(self.model, cell.optim)  # type: ignore[arg-type]
        probe = self.source.probe(cell.data.probe_batch, cell.data.seq)
        self.unigram_entropy = self.source.unigram_loss(probe)
        self._probe_BT = torch.from_numpy(probe).to(self.model.device)
        self._probe_steps: list[int] = []
        self._probe_rows: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []

    @property
    def lanes(self) -> int:
        return len(self.seeds)

    @property
    def steps(self) -> int:
        return len(self._losses)

    def advance(self, lrs_TS: FloatArray) -> None:
        """Train one step per row of learning rates, (steps, lanes)."""
        for lrs in lrs_TS:
            if self.steps % self.cell.data.probe_every == 0:
                windows = self._probe_BT.expand(self.lanes, *self._probe_BT.shape)
                self._probe_rows.append(self.model.losses(windows))
                self._probe_steps.append(self.steps)
            data = self.cell.data
            windows = torch.from_numpy(
                np.stack(
                    [self.source.batch(s, self.steps, data.batch, data.seq) for s in self.seeds]
                )
            ).to(self.model.device)
            loss_S = self.model.train_losses(windows)
            self.optimizer.set_lrs((lrs * self.cell.ramp.lr_multiplier).tolist())
            self._norms.append(self.optimizer.step())
            self._losses.append(loss_S)

    def losses(self) -> FloatArray:
        """Train losses so far, (steps, lanes)."""
        return _stacked(self._losses, self.lanes)

    def grad_norms(self) -> FloatArray:
        """Global gradient norms before clipping so far, (steps, lanes)."""
        return _stacked(self._norms, self.lanes)

    def probes(self) -> tuple[NDArray[np.int64], FloatArray]:
        """Steps (probes,) and losses (probes, lanes) of the probe so far."""
        return np.asarray(self._probe_steps, dtype=np.int64), _stacked(
            self._probe_rows, self.lanes
        )

    def keep(self, lanes: Sequence[int]) -> None:
        """Go on with these lanes only: the others cost nothing from here on."""
        lanes = list(lanes)
        self.seeds = [self.seeds[lane] for lane in lanes]
        self.model.keep(lanes)
        self.optimizer.keep(lanes)
        for rows in (self._losses, self._norms, self._probe_rows):
            rows[:] = [row[lanes] for row in rows]


class _Rng:
    """A lane's own random state, for initialization and dropout."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.devices = [device] if device.type == "cuda" else []
        self.states: Any = None

    @contextlib.contextmanager
    def in_place(self, *, is_kept: bool = True) -> Iterator[None]:
        """Run with this state as the global one, then put the global one back.

        ``is_kept``: remember where the state got to.
        """
        outside = self._get()
        if self.states is None:
            torch.manual_seed(self.seed)
            np.random.seed(self.seed % 2**32)
            random.seed(self.seed)
        else:
            self._set(self.states)
        try:
            yield
        finally:
            if is_kept:
                self.states = self._get()
            self._set(outside)

    def _get(self) -> Any:
        cuda = [torch.cuda.get_rng_state(device) for device in self.devices]
        return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()

    def _set(self, states: Any) -> None:
        cpu, cuda, numpy_state, python_state = states
        torch.set_rng_state(cpu)
        for device, state in zip(self.devices, cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, then each submodule's own mode again."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _made(build: Callable[..., nn.Module] | nn.Module, given: dict[str, Any]) -> nn.Module:
    """A module of the lane's own: what the factory returns may be shared, so it is copied."""
    try:
        made = build if isinstance(build, nn.Module) else build(**_asked(build, given))
        module = copy.deepcopy(made)
    except KeelbenchError:
        raise
    except Exception as error:
        raise KeelbenchError(
            f"the model could not be built: {type(error).__name__}: {error}",
            f"a factory may take any of {', '.join(GIVEN)} by name, and returns an nn.Module",
        ) from error
    if not isinstance(module, nn.Module):
        raise KeelbenchError(
            f"the factory returned {type(module).__name__}: expected a torch.nn.Module from "
            "tokens (B, T) to logits (B, T, V)"
        )
    return module


def _asked(build: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Those of the given values whose names the factory's parameters have."""
    parameters = inspect.signature(build).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return given
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in given.items() if name in names}


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, each once, in the order of the module."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _flat(module: nn.Module) -> Tensor:
    parts = [parameter.detach().flatten() for parameter in _trainable(module).values()]
    if not parts:
        raise KeelbenchError("the model has no trainable parameter")
    kinds = {part.dtype for part in parts}
    if len(kinds) > 1:
        raise KeelbenchError(
            f"the model's parameters have several types ({', '.join(map(str, kinds))}): "
            "keelbench trains one"
        )
    return torch.cat(parts)


def _tensors(module: nn.Module, vocab: int) -> list[TensorLayout]:
    """What the optimizer is told of each parameter: its shape, and matrix or not."""
    embeddings = {
        p for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    }
    heads = [
        m.weight
        for m in module.modules()
        if isinstance(m, nn.Linear) and m.out_features == vocab
    ]
    return [
        _tensor(
            "head" if heads and parameter is heads[-1] else name,
            parameter,
            "embedding" if parameter in embeddings else None,
        )
        for name, parameter in _trainable(module).items()
    ]


def _tensor(name: str, parameter: Tensor, kind: Kind | None) -> TensorLayout:
    rows = parameter.shape[0] if parameter.ndim > 1 else 1
    columns = parameter.numel() // rows
    kind = kind or ("matrix" if parameter.ndim > 1 else "vector")
    return TensorLayout(name, rows, (Piece("weight", columns, 0.0),), kind)


def _stacked(rows: list[Tensor], lanes: int) -> FloatArray:
    if not rows:
        return np.empty((0, lanes))
    stacked: FloatArray = torch.stack(rows).double().cpu().numpy()
    return stacked

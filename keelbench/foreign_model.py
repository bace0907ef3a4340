"""The user's modules as lanes: weights side by side, states left as they were found."""

import contextlib
import copy
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keelbench.errors import KeelbenchError
from keelbench.layout import Kind, Piece, TensorLayout
from keelbench.specs import ModelSpec

GIVEN = ("vocab", "seq", "depth", "width", "seed")
"""What a factory may ask for by the names of its parameters."""


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

    def _tried(self, module: nn.Module, tokens_BT: Tensor) -> Tensor:
        """The logits of a first call; an error in it says what the model was given."""
        try:
            return self._logits(module, tokens_BT)
        except KeelbenchError:
            raise
        except Exception as error:
            raise KeelbenchError(
                f"the model fails on tokens {tuple(tokens_BT.shape)} in [0, {self.vocab}): "
                f"{type(error).__name__}: {error}",
                "let the factory take vocab and seq, and size embeddings by them",
            ) from error

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
                    found.append(self._tried(module, given)[0, :-1].float())
        if seq > 1 and not torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-4):
            raise KeelbenchError(
                "the model is not causal: logits change with a later token",
                "mask attention so that position t sees tokens 0 to t only",
            )


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

"""What is timed against each other: keelbench, and what a user would write instead.

Each contender is built in a process of its own and then trains some steps on demand, so
that contenders can take turns on one machine within one run.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from keelbench.archs import make_rule
from keelbench.data import open_source
from keelbench.engine import Engine
from keelbench.model import LaneModel
from keelbench.specs import CellSpec, DataSpec, ModelSpec

LR = 1e-4
"""Small enough that nothing diverges while it is timed."""

CAPACITY = 100_000
"""Steps that an engine may be asked for; its log is a few MB."""


@dataclass(frozen=True)
class Shape:
    """(L, width, batch, time, lanes) of a comparison."""

    depth: int
    width: int
    batch: int
    seq: int
    lanes: int

    @property
    def name(self) -> str:
        return (
            f"L={self.depth}, width {self.width}, {self.batch}×{self.seq}, {self.lanes} lanes"
        )

    def cell(self, **more: Any) -> CellSpec:
        model = ModelSpec(depth=self.depth, width=self.width)
        data = DataSpec(batch=self.batch, seq=self.seq)
        return replace(CellSpec(model=model, data=data), **more).validated()


Run = Callable[[int], int]
"""Trains this many steps and returns the number of lane-steps done."""


def keelbench(shape: Shape, dtype: str = "float32", has_probe: bool = True) -> Run:
    """The engine as `keelbench maxlr` runs it, its probe included."""
    cell = shape.cell(dtype=dtype)
    if not has_probe:
        cell = cell.replaced({"data.probe_every": CAPACITY})
    engine = Engine(cell, range(shape.lanes), CAPACITY)

    def run(steps: int) -> int:
        engine.advance(np.full((steps, shape.lanes), LR))
        return steps * shape.lanes

    return run


def eager(shape: Shape, compiled: bool = False) -> Run:
    """(b) One seed after another: plain PyTorch operations, fused AdamW, clipping; no probe."""
    cell = shape.cell()
    source = open_source(cell.data)
    model = LaneModel(cell.model, make_rule(cell.model.arch), source.vocab, [0], is_fused=False)
    if compiled:
        model._block = torch.compile(model._block, dynamic=False)  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW([model.flat_SP], lr=LR, betas=(0.9, 0.95), fused=True)
    at = iter(range(CAPACITY))

    def run(steps: int) -> int:
        for _ in range(steps):
            windows = source.batch(0, next(at), shape.batch, shape.seq)
            optimizer.zero_grad(set_to_none=True)
            model.losses(torch.from_numpy(windows)[None]).sum().backward()
            torch.nn.utils.clip_grad_norm_([model.flat_SP], 1.0)
            optimizer.step()
        return steps

    return run


def compiled(shape: Shape) -> Run:
    """(c) As ``eager``, its blocks compiled."""
    return eager(shape, compiled=True)


def lr_finder(shape: Shape) -> Run:
    """(a) An x-transformers model of this shape in torch-lr-finder's range test."""
    from torch_lr_finder import LRFinder
    from x_transformers import Decoder, TransformerWrapper

    model_spec = shape.cell().model
    assert model_spec.heads and model_spec.kv_heads
    network = TransformerWrapper(
        num_tokens=128,
        max_seq_len=shape.seq,
        use_abs_pos_emb=False,
        attn_layers=Decoder(
            dim=shape.width,
            depth=shape.depth // 2,
            heads=model_spec.heads,
            attn_dim_head=shape.width // model_spec.heads,
            attn_kv_heads=model_spec.kv_heads,
            attn_flash=True,
            rotary_pos_emb=True,
            use_rmsnorm=True,
            ff_glu=True,
            ff_swish=True,
            ff_mult=3,
            ff_no_bias=True,
        ),
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)

    def criterion(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    source = open_source(shape.cell().data)

    def run(steps: int) -> int:
        finder = LRFinder(network, optimizer, criterion, device="cpu")
        finder.range_test(
            _Loader(source, shape, steps), end_lr=LR, num_iter=steps, diverge_th=1e9
        )
        finder.reset()
        return steps

    return run


class _Loader(torch.utils.data.DataLoader):  # type: ignore[type-arg]
    """Windows as (inputs, targets): what the LR finder takes."""

    def __init__(self, source: Any, shape: Shape, steps: int) -> None:
        rows = np.stack([source.batch(0, i, shape.batch, shape.seq) for i in range(steps)])
        tokens = torch.from_numpy(rows)
        super().__init__(
            torch.utils.data.TensorDataset(tokens[..., :-1], tokens[..., 1:]), batch_size=None
        )


CONTENDERS: dict[str, Callable[..., Run]] = {
    "keelbench": keelbench,
    "eager": eager,
    "compiled": compiled,
    "lr_finder": lr_finder,
}


def serve(pipe: Any, name: str, shape: Shape, threads: int, options: dict[str, Any]) -> None:
    """A process: build, report how long that took, then train on demand until None comes."""
    import contextlib
    import os

    torch.set_num_threads(threads)
    started = time.perf_counter()
    with (
        open(os.devnull, "w") as null,  # noqa: PTH123
        contextlib.redirect_stderr(null),
        contextlib.redirect_stdout(null),
    ):
        run = CONTENDERS[name](shape, **options)
        run(2)
        pipe.send(time.perf_counter() - started)
        for steps in _orders(pipe):
            started, worked = time.perf_counter(), time.process_time()
            done = run(steps)
            seconds = time.perf_counter() - started
            pipe.send((done, seconds, time.process_time() - worked))


def _orders(pipe: Any) -> Iterator[int]:
    while (steps := pipe.recv()) is not None:
        yield steps

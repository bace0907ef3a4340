"""A step against its own matrix products and attention kernels, each timed alone.

CPU time of one thread, so that other work on the machine disturbs less; operands are warm,
which makes the limit harder to reach than the step's own cold ones would.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.contenders import Shape, eager, keelbench
from keelbench.native import kernels
from keelbench.sublayers import Rope

ROUNDS = 9


def limit(shape: Shape) -> dict[str, Any]:
    """Milliseconds of a step and of its parts, medians of interleaved rounds."""
    torch.set_num_threads(1)
    ours, plain = keelbench(shape, has_probe=False), eager(shape)
    probed = keelbench(shape)
    products, ours_attention, torch_attention = _products(shape), *_attentions(shape)
    measured: dict[str, list[float]] = {}
    for run in (ours, plain, probed):
        run(4)
    for _ in range(ROUNDS):
        now = {
            "step": _time(lambda: ours(4), 1) / 4,
            "step_with_probe": _time(lambda: probed(4), 1) / 4,
            "plain_step": _time(lambda: plain(2), 1) / 2,
            "products": sum(count * _time(run) for count, run in products),
            "attention": sum(count * _time(run) for count, run in ours_attention),
            "torch_attention": sum(count * _time(run) for count, run in torch_attention),
        }
        now["over_limit"] = now["step"] / (now["products"] + now["attention"])
        now["over_torch_limit"] = now["step"] / (now["products"] + now["torch_attention"])
        now["plain_over_torch_limit"] = now["plain_step"] / (
            now["products"] + now["torch_attention"]
        )
        now["probe_share"] = 1 - now["step"] / now["step_with_probe"]
        for key, value in now.items():
            measured.setdefault(key, []).append(value)
    return {key: round(statistics.median(values), 3) for key, values in measured.items()} | {
        "shape": shape.name,
        "best_gflops": round(_best_rate(), 1),
    }


Part = tuple[int, Callable[[], Any]]


def _products(shape: Shape) -> list[Part]:
    """Every matrix product of a step, forward and backward, with its count."""
    model = shape.cell().model
    assert model.heads and model.kv_heads and model.hidden
    tokens, width, blocks = shape.batch * shape.seq, shape.width, model.blocks
    qkv = width + 2 * model.kv_heads * (width // model.heads)
    layers = [
        (width, qkv, blocks),
        (width, width, blocks),
        (width, 2 * model.hidden, blocks),
        (model.hidden, width, blocks),
        (width, 128, 1),
    ]
    parts: list[Part] = []
    for rows, columns, count in layers:
        x = torch.randn(shape.lanes, tokens, rows)
        w = torch.randn(shape.lanes, rows, columns)
        g = torch.randn(shape.lanes, tokens, columns)
        parts.append((count, lambda x=x, w=w: torch.bmm(x, w)))  # type: ignore[misc]
        parts.append((count, lambda g=g, w=w: torch.bmm(g, w.mT)))  # type: ignore[misc]
        parts.append((count, lambda x=x, g=g: torch.bmm(x.mT, g)))  # type: ignore[misc]
    return parts


def _attentions(shape: Shape) -> tuple[list[Part], list[Part]]:
    """Attention forward and backward: the C kernels (with RoPE), and torch's (without)."""
    model = shape.cell().model
    assert model.heads and model.kv_heads
    heads, kv, head_dim = model.heads, model.kv_heads, shape.width // model.heads
    batch, blocks = shape.lanes * shape.batch, model.blocks
    turn = Rope(shape.seq, head_dim, torch.device("cpu"), torch.float32).turn_1T1K
    qkv = torch.randn(batch, shape.seq, heads + 2 * kv, head_dim)
    y, softmax = kernels.attend_forward(qkv, turn, heads, kv)
    grad = torch.randn_like(y)
    ours: list[Part] = [
        (blocks, lambda: kernels.attend_forward(qkv, turn, heads, kv)),
        (blocks, lambda: kernels.attend_backward(grad, qkv, turn, y, softmax, kv)),
    ]
    q, k, v = (
        part.transpose(1, 2).requires_grad_() for part in qkv.split((heads, kv, kv), dim=2)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    result, flowing = forward(), grad.transpose(1, 2)

    def backward() -> Any:
        return torch.autograd.grad(result, (q, k, v), flowing, retain_graph=True)

    return ours, [(blocks, torch.no_grad()(forward)), (blocks, backward)]


def _time(run: Callable[[], Any], repeats: int = 20) -> float:
    """Milliseconds of CPU time per call."""
    if repeats > 1:
        run()
    started = time.thread_time()
    for _ in range(repeats):
        run()
    return (time.thread_time() - started) / repeats * 1e3


def _best_rate() -> float:
    """The machine's best rate of matrix products on one thread, in GFLOP/s."""
    size = 1024
    a = torch.randn(size, size)
    return float(2 * size**3 / min(_time(lambda: a @ a, 5) for _ in range(5)) / 1e6)

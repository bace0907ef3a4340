"""``keelbench archs`` and ``keelbench describe``: what there is, without building it."""

import json
import textwrap
from itertools import zip_longest
from typing import Annotated, Any

import typer

from keelbench.cli import app

archs_app = typer.Typer(
    invoke_without_command=True, help="List the architectures, or check one of your own."
)
app.add_typer(archs_app, name="archs")


@archs_app.callback()
def archs(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """List the architectures with equation and source."""
    if context.invoked_subcommand is not None:
        return
    from keelbench.archs import ARCHS, make_rule
    from keelbench.cli.output import terminal_width

    rows = [(name, make_rule(name)) for name in ARCHS.names()]
    if as_json:
        facts = [
            {"name": n, "title": r.title, "equation": r.equation, "source": r.source}
            for n, r in rows
        ]
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    width = max(len(name) for name, _ in rows)
    room = max(20, terminal_width() - width - 2)
    for name, rule in rows:
        equation = textwrap.wrap(rule.equation, room)
        source = textwrap.wrap(f"{_parameters(rule)}{rule.source}", room)
        for label, line in zip_longest([name], [*equation, *source], fillvalue=""):
            print(f"{label:<{width}}  {line}")


def _parameters(rule: Any) -> str:
    import dataclasses

    fields = [f for f in dataclasses.fields(rule) if f.init]
    given = ", ".join(f"{f.name}={_default(f.default)}" for f in fields)
    return f"({given}); " if given else ""


def _default(value: Any) -> str:
    if value is None:
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)


@archs_app.command("check")
def archs_check(
    arch: Annotated[str, typer.Argument(help="path/to/file.py:MyRule, or a name.")],
    depth: Annotated[int, typer.Option(help="Sub-layers of the model it is tried in.")] = 8,
    width: Annotated[int, typer.Option()] = 32,
) -> None:
    """Run the contract tests on a rule: causal, lane-independent, gains used, and more."""
    from keelbench.contract import check_rule, render_findings

    findings = check_rule(arch, depth=depth, width=width)
    print(render_findings(arch, findings))
    if any(not finding.passed for finding in findings):
        raise typer.Exit(2)


@app.command()
def describe(
    arch: Annotated[str, typer.Argument(help="Architecture, with parameters if any.")],
    depth: Annotated[int, typer.Option(help="Sub-layers; blocks are half of it.")] = 64,
    width: Annotated[int, typer.Option()] = 64,
    heads: Annotated[int | None, typer.Option()] = None,
    batch: Annotated[int, typer.Option()] = 8,
    seq: Annotated[int, typer.Option()] = 64,
    vocab: Annotated[int, typer.Option(help="Vocabulary (128: the bundled text).")] = 128,
    lanes: Annotated[int, typer.Option(help="Lanes in the memory estimate.")] = 1,
    dtype: Annotated[str, typer.Option()] = "float32",
) -> None:
    """Print an architecture's equation, init table, size and memory, without building it."""
    from keelbench.archs import Site, make_rule
    from keelbench.layout import flops_per_token, layout, parameter_count
    from keelbench.memory import estimate_memory
    from keelbench.sweep_spec import make_cell

    cell = make_cell(
        {
            "arch": arch,
            "depth": depth,
            "width": width,
            "heads": heads,
            "batch": batch,
            "seq": seq,
            "dtype": dtype,
            "vocab": vocab,
        }
    )
    rule = make_rule(cell.model.arch)
    tensors = layout(cell.model, rule, vocab)
    block_sites = [Site(depth - 2, depth), Site(depth - 1, depth)]
    norms = sum(len(rule.norm_slots(site)) for site in block_sites)
    facts = {
        "architecture": f"{rule.title or cell.model.arch} ({cell.model.arch})",
        "equation": rule.equation,
        "source": rule.source,
        **rule.facts(depth),
        "depth": f"{depth} sub-layers, {depth // 2} blocks",
        "width": f"{width}, {cell.model.heads} query and {cell.model.kv_heads} KV heads, "
        f"SwiGLU hidden {cell.model.hidden}",
        "norms per block": f"{norms} on the trunk"
        + (", QKV-norm" if rule.qkv_norm(block_sites[0]) else "")
        + ("; final norm" if rule.final_norm else "; no final norm"),
        "parameters": f"{parameter_count(tensors):,}",
        "FLOPs per token": f"{flops_per_token(cell.model, tensors, seq):,} (training)",
    }
    for checkpointing in (False, True):
        estimate = estimate_memory(cell, vocab, lanes, is_checkpointed=checkpointing)
        label = "with checkpointing" if checkpointing else "training memory"
        facts[label] = f"{estimate / 2**20:,.0f} MiB at {lanes} x {batch} x {seq} tokens"
    longest = max(len(key) for key in facts)
    for key, value in facts.items():
        print(f"{key:<{longest}}  {value}")
    print()
    _print_init_table(tensors, depth)


def _print_init_table(tensors: list[Any], depth: int) -> None:
    """One line per kind of tensor: the first and last site may differ from the rest."""
    kinds: dict[tuple[str, str, str, str], int] = {}
    for tensor in tensors:
        name = tensor.name.split(".", 1)[-1] if tensor.name[0].isdigit() else tensor.name
        for piece in tensor.pieces:
            start = f"N(0, {piece.std:.4g}²)" if piece.std else f"{piece.constant:g}"
            label = name if piece.name in ("gain", "param", name) else f"{name} [{piece.name}]"
            shape = (
                f"{tensor.rows} x {piece.columns}" if tensor.rows > 1 else f"{piece.columns}"
            )
            key = (label, shape, start, tensor.kind)
            kinds[key] = kinds.get(key, 0) + 1
    widths = [max(len(key[i]) for key in kinds) for i in range(3)]
    header = ("tensor", "shape", "init")
    widths = [max(w, len(h)) for w, h in zip(widths, header, strict=True)]
    line = "  ".join(f"{h:<{w}}" for h, w in zip(header, widths, strict=True))
    print(f"{line}  count")
    for key, count in kinds.items():
        cells = "  ".join(f"{key[i]:<{widths[i]}}" for i in range(3))
        print(f"{cells}  {count:>5}")

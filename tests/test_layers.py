"""The direction of imports, and which package may use what (docs: the table of rows).

Imports only ever point down, or to a module of the same row as long as nothing imports in a
circle. Heavy packages load only where they are needed, so that ``--help`` and everything
downstream of stored results start fast.
"""

import ast
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from helpers import run_python

import keelbench

ROOT = Path(keelbench.__file__).parent

ROWS = (
    ("errors",),
    ("registry", "parsing"),
    ("specs",),
    ("records",),
    ("archs", "layout", "memory", "shortcut", "data", "tasks"),
    ("changepoint", "divergence", "stats", "log_table", "logs"),
    ("native", "norms", "fused", "sublayers", "compiled", "cuda_graph"),
    ("model", "optim", "engine", "foreign", "foreign_model", "observe", "contract"),
    (
        "ramp",
        "hold",
        "refine",
        "search",
        "store",
        "launch",
        "sweep_spec",
        "training",
        "rejudge",
    ),
    ("capacity",),
    ("sweep", "parallel", "gradients", "diagnose", "lrsweep", "redundancy", "scaling"),
    ("task_scores", "report", "gate"),
    ("api", "cli", "pytest_plugin", "__main__"),
)
"""Modules and packages from the bottom up; the package itself only names the public API."""

TORCH_AT_IMPORT = (
    *("native", "norms", "fused", "sublayers", "compiled", "cuda_graph"),
    *("model", "optim", "engine", "foreign", "foreign_model", "observe", "contract"),
    *("ramp", "search", "training", "gradients", "diagnose", "redundancy", "task_scores"),
)
"""Everything else may use torch inside functions at most, or for annotations."""

ONLY_IN = {
    "rich": ("cli/progress", "report/", "gate/outputs"),
    "typer": ("cli/",),
    "matplotlib": ("report/plots",),
    "pandas": ("report/", "gate/"),
    "pytest": ("pytest_plugin",),
}

LIGHT = ("keelbench.cli", "keelbench.archs", "keelbench.report", "keelbench.gate")


@dataclass(frozen=True)
class Import:
    """One import of one module."""

    source: str
    """Path of the importing module without suffix, such as ``report/tables/table``."""
    target: str
    """Dotted name of what is imported."""
    line: int
    is_at_import: bool
    """Runs when the module is loaded: outside functions and TYPE_CHECKING."""
    is_for_annotations: bool
    """Under TYPE_CHECKING: never runs."""

    @property
    def top(self) -> str:
        return self.target.split(".")[0]

    def __str__(self) -> str:
        return f"{self.source}.py:{self.line} imports {self.target}"


@cache
def modules() -> dict[str, ast.Module]:
    return {
        path.relative_to(ROOT).with_suffix("").as_posix(): ast.parse(path.read_text())
        for path in sorted(ROOT.rglob("*.py"))
    }


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for name, tree in modules().items() for found in walk(name, tree))


def walk(
    source: str, node: ast.AST, is_deferred: bool = False, is_typing: bool = False
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        targets: list[str] = []
        if isinstance(child, ast.Import):
            targets = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, f"{source}.py:{child.lineno}: imports are absolute"
            targets = [f"{child.module}.{alias.name}" for alias in child.names]
        for target in targets:
            at_import = not (is_deferred or is_typing)
            yield Import(source, target, child.lineno, at_import, is_typing)
        is_function = isinstance(child, ast.FunctionDef | ast.Lambda)
        is_guard = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        yield from walk(source, child, is_deferred or is_function, is_typing or is_guard)


def unit(dotted: str) -> str:
    """The first part below keelbench: what the table lists. Empty for the package itself."""
    parts = dotted.replace("/", ".").removeprefix("keelbench").strip(".").split(".")
    names = {name for row in ROWS for name in row}
    is_listed = parts[0] in names or (ROOT / parts[0]).is_dir()
    return parts[0] if is_listed or (ROOT / f"{parts[0]}.py").is_file() else ""


def row_of(name: str) -> int:
    return next((row for row, names in enumerate(ROWS) if name in names), len(ROWS))


def internal() -> list[tuple[str, str, Import]]:
    """(importing unit, imported unit, import) for every import between units."""
    found = []
    for one in imports():
        if one.top == "keelbench" and one.source != "__init__":
            pair = unit(one.source), unit(one.target)
            if pair[1] and pair[0] != pair[1]:
                found.append((*pair, one))
    return found


def assert_none(wrong: Iterable[Import]) -> None:
    lines = "\n".join(str(one) for one in wrong)
    assert not lines, f"\n{lines}"


def test_every_module_has_a_row() -> None:
    placed = {name for row in ROWS for name in row} | {"__init__"}
    there = {name.split("/")[0] for name in modules()}
    assert there - placed == set(), "give each new module a row in this file"


def test_imports_only_ever_point_down_or_sideways() -> None:
    assert_none(one for a, b, one in internal() if row_of(b) > row_of(a))


def test_nothing_imports_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for a, b, _ in internal():
        edges.setdefault(a, set()).add(b)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for target in sorted(edges.get(name, ())):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())


def test_torch_is_imported_with_the_module_only_where_tensors_are_made() -> None:
    assert_none(
        one
        for one in imports()
        if one.top == "torch" and one.is_at_import and unit(one.source) not in TORCH_AT_IMPORT
    )


def test_architectures_are_arithmetic_and_never_load_torch() -> None:
    assert_none(
        one
        for one in imports()
        if one.top == "torch" and unit(one.source) == "archs" and not one.is_for_annotations
    )


@pytest.mark.parametrize("package", list(ONLY_IN))
def test_a_heavy_package_is_used_only_where_it_belongs(package: str) -> None:
    assert_none(
        one
        for one in imports()
        if one.top == package
        and not one.is_for_annotations
        and not one.source.startswith(ONLY_IN[package])
    )


def test_only_the_command_line_prints_or_exits() -> None:
    wrong = []
    for name, tree in modules().items():
        if name.startswith(("cli/", "__main__")):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.exit"):
                wrong.append(f"{name}.py:{node.lineno}")
            if isinstance(node, ast.Raise) and "SystemExit" in ast.unparse(node):
                wrong.append(f"{name}.py:{node.lineno}")
    assert wrong == []


@pytest.mark.parametrize("name", LIGHT)
def test_what_needs_no_torch_does_not_load_it(name: str) -> None:
    code = f"import {name}, json, sys; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(run_python(code))
    assert name in loaded
    assert "torch" not in loaded


def test_the_package_itself_loads_nothing() -> None:
    code = "import keelbench, json, sys; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(run_python(code))
    assert not {"numpy", "yaml", "torch", "keelbench.specs"} & set(loaded)

"""Names to objects: built-ins, entry points, files and ``module:attr`` alike.

Built-in and foreign objects take the same path. Nothing is imported before it is
asked for, so listing names costs no import of torch.
"""

import ast
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from keyword import iskeyword
from pathlib import Path
from typing import Any

from keelbench.errors import KeelbenchError


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """`` (did you mean 'keel'?)`` for a near miss, else an empty string."""
    near = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else ""


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Split ``mix_ln(post_fraction=0.25)`` into its name and literal arguments.

    Bare words count as strings (``beta=deepnet``), ``true`` and ``false`` as booleans.

    Raises:
        KeelbenchError: if the text is not ``name`` or ``name(key=literal, ...)``.
    """
    text = text.strip()
    if "(" not in text:
        return text, {}
    prefix, _, call = text.rpartition(":")
    wrong = KeelbenchError(
        f"cannot read '{text}': expected name(key=value, ...) with literal values",
        "for example mix_ln(post_fraction=0.25) or keel(first_block=v1)",
    )
    try:
        node = ast.parse(call, mode="eval").body
    except SyntaxError:
        raise wrong from None
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)) or node.args:
        raise wrong
    name = f"{prefix}:{node.func.id}" if prefix else node.func.id
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise wrong
        arguments[keyword.arg] = _literal(keyword.value, wrong)
    return name, arguments


def _literal(node: ast.expr, wrong: KeelbenchError) -> Any:
    if isinstance(node, ast.Name):
        return {"true": True, "false": False}.get(node.id, node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise wrong from None


def format_call(name: str, arguments: dict[str, Any]) -> str:
    """The inverse of :func:`parse_call`, with keys in order: one spelling per object."""
    if not arguments:
        return name
    inner = ", ".join(f"{key}={_spell(arguments[key])}" for key in sorted(arguments))
    return f"{name}({inner})"


def _spell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    is_word = isinstance(value, str) and value.isidentifier() and not iskeyword(value)
    return value if is_word and value not in ("true", "false") else repr(value)


def load_object(reference: str) -> Any:
    """Import ``pkg.module:attr`` or ``path/to/file.py:attr``.

    Raises:
        KeelbenchError: if the module, file or attribute does not exist, or fails to import.
    """
    module_name, _, attribute = reference.rpartition(":")
    if not module_name or not attribute:
        raise KeelbenchError(
            f"'{reference}' names no object: expected pkg.module:attr or path/to/file.py:attr"
        )
    try:
        if module_name.endswith(".py"):
            module = _import_file(Path(module_name))
        else:
            module = importlib.import_module(module_name)
    except KeelbenchError:
        raise
    except Exception as error:
        raise KeelbenchError(
            f"cannot import '{module_name}': {type(error).__name__}: {error}",
            "run it with python alone to see the whole traceback",
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        near = did_you_mean(attribute, public)
        raise KeelbenchError(f"'{module_name}' has no '{attribute}'{near}") from None


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise KeelbenchError(f"no such file: {path}")
    name = f"keelbench_user_{path.stem}_{abs(hash(str(path.resolve())))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise KeelbenchError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class Registry:
    """Name to object or to a ``module:attr`` string that is imported on first use.

    Args:
        kind: what is registered, in the singular, for messages ("architecture").
        group: the entry-point group through which other packages add names.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._objects: dict[str, Any] = {}

    def register(self, name: str, target: Any) -> None:
        """Add a name.

        Raises:
            KeelbenchError: if the name is taken: clashes are never settled silently.
        """
        if name in self._objects:
            raise KeelbenchError(f"{self.kind} '{name}' is registered twice")
        self._objects[name] = target

    def names(self) -> list[str]:
        """Built-in names in the order of registration, then those of entry points."""
        return list(self._all())

    def get(self, name: str) -> Any:
        """The object behind a registered name or a ``module:attr`` reference.

        Raises:
            KeelbenchError: if there is none, with the nearest name.
        """
        if ":" in name:
            return load_object(name)
        known = self._all()
        if name not in known:
            near = did_you_mean(name, known)
            raise KeelbenchError(
                f"unknown {self.kind} '{name}'{near}", f"known: {', '.join(known)}"
            )
        target = known[name]
        return load_object(target) if isinstance(target, str) else target

    def _all(self) -> dict[str, Any]:
        known = dict(self._objects)
        for entry in entry_points(group=self.group):
            if entry.name in known:
                raise KeelbenchError(
                    f"{self.kind} '{entry.name}' is registered twice: "
                    f"the entry point {entry.value} clashes with a name already taken"
                )
            known[entry.name] = entry.value
        return known

"""Plain values to frozen dataclasses: strict keys, right types, every problem at once."""

import dataclasses
import hashlib
import json
import types
import typing
from typing import Any

from keelbench.errors import KeelbenchError
from keelbench.registry import did_you_mean


def content_hash(values: Any) -> str:
    """12 hex digits that change with any value, but not with the order of keys."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def raise_problems(problems: list[str]) -> None:
    """Raise one error that lists every problem, or return."""
    if not problems:
        return
    if len(problems) == 1:
        raise KeelbenchError(problems[0])
    lines = "\n".join(f"  - {problem}" for problem in problems)
    raise KeelbenchError(f"{len(problems)} problems:\n{lines}", problems=tuple(problems))


def build_dataclass(cls: type, values: Any, prefix: str, problems: list[str]) -> Any:
    """Read nested mappings into a dataclass; what is wrong is added to ``problems``.

    Args:
        cls: a dataclass whose fields are plain types, ``X | None`` or dataclasses.
        values: the mapping.
        prefix: where it stands, such as ``model.``.
        problems: one sentence is appended for each unknown key and wrong type.
    """
    if not isinstance(values, dict):
        problems.append(f"{prefix.rstrip('.') or 'cell'} must be a mapping, got {values!r}")
        return None
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            near = did_you_mean(str(key), hints)
            problems.append(
                f"unknown setting '{prefix}{key}'{near}: allowed are {', '.join(hints)}"
            )
        elif dataclasses.is_dataclass(hints[key]):
            arguments[key] = build_dataclass(hints[key], value, f"{prefix}{key}.", problems)
        else:
            arguments[key] = _coerce(value, hints[key], f"{prefix}{key}", problems)
    return None if problems else cls(**arguments)


def _coerce(value: Any, hint: Any, name: str, problems: list[str]) -> Any:
    """Accept a value of the hinted type; YAML reads ``1e-5`` as text, so parse text."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    kind = next(option for option in options if option is not type(None))
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
            return {"true": True, "false": False}[str(value).lower()]
        if kind is int and not isinstance(value, bool):
            if float(value) == int(float(value)):
                return int(float(value))
        elif kind is float and not isinstance(value, bool):
            return float(value)
        elif kind is str and isinstance(value, str):
            return value
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    noun = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    problems.append(f"{name} is {value!r}: it must be {noun[kind]}")
    return value

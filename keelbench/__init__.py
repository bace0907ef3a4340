"""keelbench: measure the Maximum Tolerable Learning Rate of Transformer architectures."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["KeelbenchError", "Record", "Trace", "Verdict", "find_max_lr", "judge"]

if TYPE_CHECKING:
    from keelbench.api import find_max_lr
    from keelbench.divergence import judge
    from keelbench.errors import KeelbenchError
    from keelbench.records import Record, Trace, Verdict

_HOMES = {
    "KeelbenchError": "errors",
    "Record": "records",
    "Trace": "records",
    "Verdict": "records",
    "find_max_lr": "api",
    "judge": "divergence",
}


def __getattr__(name: str) -> Any:
    """Load the public names on first use, so that ``import keelbench`` costs nothing."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'keelbench' has no attribute '{name}'")
    return getattr(importlib.import_module(f"keelbench.{_HOMES[name]}"), name)

"""Names of a package that load on first use, so that importing one part never loads another's dependencies."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def lazy(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package, with the names that it imports for type checkers.

        if TYPE_CHECKING:
            from .client import RolloutClient as RolloutClient
        else:
            __all__, __getattr__, __dir__ = lazy(__name__)

    The package's source is read for them (0.3 ms for the longest list): it may lie in an archive, and cannot be left out.
    Source: PEP 562.
    """
    this = sys.modules[package]
    block = next(part for part in ast.parse(inspect.getsource(this)).body if isinstance(part, ast.If))
    imports = [part for part in block.body if isinstance(part, ast.ImportFrom)]
    home = {alias.name: f".{part.module}" for part in imports for alias in part.names}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=this)
        value = getattr(importlib.import_module(home[name], package), name)
        setattr(this, name, value)  # the next time it is found without this function
        return value

    return sorted(home), load, lambda: sorted(home)

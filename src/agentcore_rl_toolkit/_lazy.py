"""Names of a package that load on first use, so that importing one part never loads another's dependencies.

Type checkers and editors do not run the table: they read the imports under ``TYPE_CHECKING`` beside it, and report a name
that is not there. ``tests/test_lazy.py`` holds that both list the same names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy(
    package: str, names: Mapping[str, Iterable[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a package. ``names`` are its public names, by the module that has them:

        if TYPE_CHECKING:
            from .client import RolloutClient as RolloutClient
        else:
            __all__, __getattr__, __dir__ = lazy(__name__, {".client": ("RolloutClient",)})

    Source: PEP 562.
    """
    home = {name: module for module, its in names.items() for name in its}

    def load(name: str) -> Any:
        this = sys.modules[package]
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=this)
        value = getattr(importlib.import_module(home[name], package), name)
        setattr(this, name, value)  # the next time it is found without this function
        return value

    return sorted(home), load, lambda: sorted(home)

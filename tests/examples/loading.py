"""Modules of the examples, which are no packages and use the same names."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(file: Path) -> ModuleType:
    """A module under a name that no other example has."""
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def modules_of(folder: Path, *names: str) -> Iterator[SimpleNamespace]:
    """Modules that import each other by their plain names, which other examples have too: they go again."""
    for name in names:
        sys.modules.pop(name, None)
    sys.path.insert(0, str(folder))
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in names})
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)

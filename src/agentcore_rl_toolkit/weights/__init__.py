"""Weights from a trainer into inference engines: a checkpoint's folder in, a version out, and the proof that they have arrived.

Names load on first use: importing this package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import write_checkpoint as write_checkpoint
    from .engines import EngineAddress as EngineAddress
    from .publishing import Publisher as Publisher
    from .publishing import prove as prove
    from .publishing import publish as publish

_HOME = {
    "EngineAddress": ".engines",
    "Publisher": ".publishing",
    "publish": ".publishing",
    "prove": ".publishing",
    "write_checkpoint": ".checkpoint",
}
__all__ = [*_HOME]  # noqa: PLE0604  (the names are strings, built from the table above)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

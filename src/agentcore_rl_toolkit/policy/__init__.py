"""The built-in policy: a language model small enough to train on two CPU cores, and the server that runs it.

Names load on first use: importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arithmetic import Problem as Problem
    from .arithmetic import calculate as calculate
    from .arithmetic import problems as problems
    from .arithmetic import reward as reward
    from .engine import Engine as Engine
    from .keys import admin_key as admin_key
    from .model import WEIGHTS_DIR as WEIGHTS_DIR
    from .model import load_policy as load_policy
    from .model import save_policy as save_policy
    from .server import create_app as create_app
    from .tokens import ChatTokenizer as ChatTokenizer

_HOME = {
    "Problem": ".arithmetic",
    "calculate": ".arithmetic",
    "problems": ".arithmetic",
    "reward": ".arithmetic",
    "ChatTokenizer": ".tokens",
    "WEIGHTS_DIR": ".model",
    "load_policy": ".model",
    "save_policy": ".model",
    "Engine": ".engine",
    "create_app": ".server",
    "admin_key": ".keys",
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

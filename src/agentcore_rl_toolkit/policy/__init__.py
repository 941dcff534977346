"""The built-in policy: a language model small enough to train on two CPU cores, and the server that runs it.

Names load on first use: importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .engine import Engine as Engine
    from .model import WEIGHTS_DIR as WEIGHTS_DIR
    from .model import load_policy as load_policy
    from .model import save_policy as save_policy
    from .server.app import create_app as create_app
    from .server.keys import admin_key as admin_key
    from .tokens import ChatTokenizer as ChatTokenizer
    from .word_problems.problems import Problem as Problem
    from .word_problems.problems import calculate as calculate
    from .word_problems.problems import problems as problems
    from .word_problems.problems import reward as reward

_MODULES = {
    "Problem": ".word_problems.problems",
    "calculate": ".word_problems.problems",
    "problems": ".word_problems.problems",
    "reward": ".word_problems.problems",
    "ChatTokenizer": ".tokens",
    "WEIGHTS_DIR": ".model",
    "load_policy": ".model",
    "save_policy": ".model",
    "Engine": ".engine",
    "create_app": ".server.app",
    "admin_key": ".server.keys",
}
__all__ = [*_MODULES]  # noqa: PLE0604  (the names are strings, built from the table above)
__getattr__, __dir__ = lazy(__name__, _MODULES)

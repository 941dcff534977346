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
    from .word_problems import Problem as Problem
    from .word_problems import calculate as calculate
    from .word_problems import problems as problems
    from .word_problems import reward as reward
else:
    __all__, __getattr__, __dir__ = lazy(__name__)

"""A local AgentCore Runtime: the AWS wire API, one isolated process per session.

`LocalRuntime` runs one beside a program or a test; `agentcore-rl runtime serve` runs one by hand.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .local import LocalRuntime as LocalRuntime

__all__ = ["LocalRuntime"]


def __getattr__(name: str) -> Any:
    if name == "LocalRuntime":
        return importlib.import_module(".local", __name__).LocalRuntime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""A local AgentCore Runtime: the AWS wire API, one isolated process per session.

`LocalRuntime` runs one for a program or a test; `agentcore-rl runtime serve` runs one by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .local import LocalRuntime as LocalRuntime
else:
    __all__, __getattr__, __dir__ = lazy(__name__)

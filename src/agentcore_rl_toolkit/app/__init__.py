"""The agent side: an AgentCore app whose entrypoint is a rollout."""

from __future__ import annotations

from ..contract import RolloutConfig
from .app import AgentCoreRLApp
from .settings import AgentSettings

__all__ = ["AgentCoreRLApp", "AgentSettings", "RolloutConfig"]

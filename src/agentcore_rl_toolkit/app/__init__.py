"""The agent side: an AgentCore app whose entrypoint is a rollout."""

from __future__ import annotations

from ..contract import RolloutConfig
from .app import AgentCoreRLApp
from .model import Model
from .settings import AgentSettings
from .texts import rollout_text

__all__ = ["AgentCoreRLApp", "AgentSettings", "Model", "RolloutConfig", "rollout_text"]

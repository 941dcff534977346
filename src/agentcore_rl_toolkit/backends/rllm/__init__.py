"""rLLM: configuration and launch of its AgentCore runtime."""

from .settings import RllmConfig

__all__ = ["RllmConfig"]

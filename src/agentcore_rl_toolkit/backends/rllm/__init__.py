"""rLLM: configuration and launch of its AgentCore runtime, and conversion to its episode shape."""

from .convert import to_rllm
from .settings import RllmConfig

__all__ = ["RllmConfig", "to_rllm"]

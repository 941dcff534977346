"""rLLM: configuration and launch of its AgentCore runtime, and conversion to its episode shape."""

from .convert import groups_to_rllm, to_rllm
from .settings import RllmConfig

__all__ = ["RllmConfig", "groups_to_rllm", "to_rllm"]

"""The names of rllm-model-gateway, over AgentCore RL Toolkit's gateway."""

from .client import AsyncGatewayClient, GatewayClient
from .models import GatewayConfig, TraceRecord, WorkerConfig, WorkerInfo
from .server import create_app

__version__ = "0.1.0.post1"
__all__ = [
    "AsyncGatewayClient",
    "GatewayClient",
    "GatewayConfig",
    "TraceRecord",
    "WorkerConfig",
    "WorkerInfo",
    "create_app",
]

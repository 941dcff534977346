"""Rollout client: starts agents on AgentCore Runtime and collects their results."""

from .batch import AsyncBatchResult, BatchItem, BatchProgress, BatchResult, BatchRun
from .future import RolloutFuture
from .rollouts import RolloutClient
from .settings import Deadlines, WatchSettings

__all__ = [
    "AsyncBatchResult",
    "BatchItem",
    "BatchProgress",
    "BatchResult",
    "BatchRun",
    "Deadlines",
    "RolloutClient",
    "RolloutFuture",
    "WatchSettings",
]

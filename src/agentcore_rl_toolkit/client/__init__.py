"""Rollout client: starts agents on AgentCore Runtime and collects their results."""

from .batch import AsyncBatchResult, BatchItem, BatchProgress, BatchResult
from .client import RolloutClient, export_prometheus
from .future import RolloutFuture, as_completed
from .records import Replayed
from .settings import Deadlines, WatchSettings

__all__ = [
    "AsyncBatchResult",
    "BatchItem",
    "BatchProgress",
    "BatchResult",
    "Deadlines",
    "Replayed",
    "RolloutClient",
    "RolloutFuture",
    "WatchSettings",
    "as_completed",
    "export_prometheus",
]

"""Rollout client: starts agents on AgentCore Runtime and collects their results."""

from .batch import AsyncBatchResult, BatchItem, BatchProgress, BatchResult
from .future import RolloutFuture
from .ledger import FileLedger
from .records.replay import Replayed
from .rollouts import RolloutClient
from .settings import Deadlines, WatchSettings

__all__ = [
    "AsyncBatchResult",
    "BatchItem",
    "BatchProgress",
    "BatchResult",
    "Deadlines",
    "FileLedger",
    "Replayed",
    "RolloutClient",
    "RolloutFuture",
    "WatchSettings",
]

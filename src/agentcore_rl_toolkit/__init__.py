"""Reinforcement learning on the agent you deploy.

Names load on first use, so importing one part never loads another's dependencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._lazy import lazy

if TYPE_CHECKING:
    from .app import AgentCoreRLApp as AgentCoreRLApp
    from .client import AsyncBatchResult as AsyncBatchResult
    from .client import BatchItem as BatchItem
    from .client import BatchResult as BatchResult
    from .client import Deadlines as Deadlines
    from .client import RolloutClient as RolloutClient
    from .client import RolloutFuture as RolloutFuture
    from .contract import Cause as Cause
    from .contract import Outcome as Outcome
    from .errors import AgentCoreRLError as AgentCoreRLError
    from .errors import AgentError as AgentError
    from .errors import AgentLoadError as AgentLoadError
    from .errors import CaptureError as CaptureError
    from .errors import ConfigError as ConfigError
    from .errors import ContractError as ContractError
    from .errors import GatewayError as GatewayError
    from .errors import GatewayLostError as GatewayLostError
    from .errors import InvalidResultError as InvalidResultError
    from .errors import LocalRuntimeError as LocalRuntimeError
    from .errors import MissingExtraError as MissingExtraError
    from .errors import ObjectExistsError as ObjectExistsError
    from .errors import ObjectNotFoundError as ObjectNotFoundError
    from .errors import ObjectTooLargeError as ObjectTooLargeError
    from .errors import PolicyError as PolicyError
    from .errors import PolicyFailure as PolicyFailure
    from .errors import RolloutCancelledError as RolloutCancelledError
    from .errors import RolloutError as RolloutError
    from .errors import RolloutLostError as RolloutLostError
    from .errors import RolloutThrottledError as RolloutThrottledError
    from .errors import RolloutTimeoutError as RolloutTimeoutError
    from .errors import StoreError as StoreError
    from .errors import StorePermissionError as StorePermissionError
    from .errors import UnlistableError as UnlistableError
    from .errors import UpstreamError as UpstreamError
    from .errors import WeightsError as WeightsError
    from .gateway import GatewayClient as GatewayClient
    from .reward import RewardFunction as RewardFunction

_MODULES = {
    "AgentCoreRLApp": ".app",
    "RewardFunction": ".reward",
    "Outcome": ".contract",
    "Cause": ".contract",
    "RolloutClient": ".client",
    "RolloutFuture": ".client",
    "BatchItem": ".client",
    "BatchResult": ".client",
    "AsyncBatchResult": ".client",
    "Deadlines": ".client",
    "GatewayClient": ".gateway",
    **dict.fromkeys(
        (
            "AgentCoreRLError",
            "ConfigError",
            "MissingExtraError",
            "ContractError",
            "StoreError",
            "ObjectNotFoundError",
            "ObjectExistsError",
            "ObjectTooLargeError",
            "UnlistableError",
            "StorePermissionError",
            "RolloutError",
            "AgentError",
            "RolloutLostError",
            "RolloutTimeoutError",
            "RolloutThrottledError",
            "RolloutCancelledError",
            "InvalidResultError",
            "GatewayError",
            "GatewayLostError",
            "CaptureError",
            "UpstreamError",
            "LocalRuntimeError",
            "AgentLoadError",
            "PolicyError",
            "PolicyFailure",
            "WeightsError",
        ),
        ".errors",
    ),
}
__all__ = [*_MODULES, "__version__"]  # noqa: PLE0604  (the names are strings, built from the table above)
_load, _names = lazy(__name__, _MODULES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("agentcore-rl-toolkit")
    return _load(name)


def __dir__() -> list[str]:
    return [*_names(), "__version__"]

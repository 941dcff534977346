"""Reinforcement learning on the agent you deploy.

Names load on first use, so importing one part never loads another's dependencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._lazy import lazy

if TYPE_CHECKING:
    from ._version import __version__ as __version__
    from .app import AgentCoreRLApp as AgentCoreRLApp
    from .app import rollout_text as rollout_text
    from .app.deployed.program import Program as Program
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
    from .errors import JudgeError as JudgeError
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
    from .errors import ScorerError as ScorerError
    from .errors import StoreError as StoreError
    from .errors import StorePermissionError as StorePermissionError
    from .errors import TrainingServiceError as TrainingServiceError
    from .errors import UpstreamError as UpstreamError
    from .errors import WeightsError as WeightsError
    from .gateway import GatewayClient as GatewayClient
    from .reward import RewardFunction as RewardFunction
    from .reward import answer_text as answer_text
else:
    __all__, __getattr__, __dir__ = lazy(__name__)

"""slime's `Sample` and argument namespace as recorded from slime 0.3.1 (git 624b824): the fields and defaults we use."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    teacher_log_probs: list[float] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING


def arguments(**more: Any) -> SimpleNamespace:
    """slime's parsed arguments, with what --custom-config-path adds."""
    values = {
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 3000,
        "agent_runtime_arn": "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math",
        "s3_bucket": "memory://records",
        "exp_id": "slime",
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "reward_key": None,
    }
    return SimpleNamespace(**{**values, **more})

"""Settings of an agent from its environment, read at the first request and never at import."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic.dataclasses import dataclass

from ..errors import ConfigError

PREFIX = "AGENTCORE_RL_"
Failures = Literal["failed", "zero"]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Settings of the agent side. `from_env` reads each from ``AGENTCORE_RL_<NAME>``.

    Units: seconds and bytes, as the names say. Empty allow-lists allow everything.
    """

    allowed_buckets: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    heartbeat_s: Seconds = 30.0  # the client calls a session lost after three missed ones
    store_check_s: Seconds = 1.0  # how long the answer waits for the store to take the first heartbeat; 0: not at all
    put_timeout_s: Seconds = 900.0
    grace_s: Seconds = 20.0  # AgentCore kills about 60 s after SIGTERM, other hosts after 30
    max_record_bytes: int = 100_000_000
    reseed: bool = True
    probe: bool = True  # answer `agentcore-rl doctor`
    # Of SageMaker's multi-turn RL jobs. Failures of agent and infrastructure: reported as such, or as a reward of 0.
    sagemaker_failures: Failures = "failed"
    sagemaker_turn_rewards: bool = False  # a list of rewards is one per sample
    sagemaker_background: bool = False  # answer at once and not when the reward is reported

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> AgentSettings:
        """Read the environment. Raises: ConfigError on a value that cannot be read."""
        env = os.environ if env is None else env
        given = {name: env.get(PREFIX + name.upper()) for name in cls.__dataclass_fields__}
        values: dict[str, Any] = {name: text.strip() for name, text in given.items() if text is not None}
        try:
            return cls(**values)
        except ValidationError as e:
            wrong = [f"{PREFIX}{str(x['loc'][0]).upper()}={x['input']!r}: {x['msg']}" for x in e.errors()]
            raise ConfigError("; ".join(wrong)) from e

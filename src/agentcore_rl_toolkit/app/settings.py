"""Settings of an agent from its environment, read at the first request and never at import."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from ..errors import ConfigError

PREFIX = "AGENTCORE_RL_"
Failures = Literal["failed", "zero"]


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Settings of the agent side. `from_env` reads each from ``AGENTCORE_RL_<NAME>``.

    Units: seconds and bytes, as the names say. Empty allow-lists allow everything.
    """

    allowed_buckets: tuple[str, ...] = ()
    heartbeat_s: float = 30.0  # the client calls a session lost after three missed ones
    store_check_s: float = 1.0  # how long the answer waits for the store to take the first heartbeat; 0: not at all
    put_timeout_s: float = 900.0
    grace_s: float = 20.0  # AgentCore kills about 60 s after SIGTERM, other hosts after 30
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
        values: dict[str, object] = {}
        for name, field in cls.__dataclass_fields__.items():
            text = env.get(PREFIX + name.upper())
            if text is None:
                continue
            try:
                values[name] = _READERS[str(field.type)](text.strip())
            except ValueError as e:
                raise ConfigError(f"{PREFIX}{name.upper()}={text!r}: {e}") from e
        return cls(**values)  # type: ignore[arg-type]  # the readers return the field's own type


def _read_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("write 1 or 0")


def _read_seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("must be a number of seconds, 0 or more")
    return value


def _read_failures(text: str) -> Failures:
    if text not in get_args(Failures):
        raise ValueError("write failed or zero")
    return cast(Failures, text)


def _read_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_READERS: dict[str, Callable[[str], object]] = {
    "bool": _read_bool,
    "float": _read_seconds,
    "int": int,
    "str": str,
    "Failures": _read_failures,
    "tuple[str, ...]": _read_list,
}

"""Settings of an agent from its environment, read at the first request and never at import."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationError
from pydantic.dataclasses import dataclass

from ..errors import ConfigError, ContractError

PREFIX = "AGENTCORE_RL_"
Failures = Literal["failed", "zero"]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Addresses that every URL parser reads in the same way: no user, escape, query or backslash. ``*`` is for patterns.
_PLAIN_URL = re.compile(r"https?://(\[[\da-fA-F:.]+\]|[\w.*-]+)(:\d{1,5})?(/[\w.~*/-]*)?", re.ASCII)


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Settings of the agent side. `from_env` reads each from ``AGENTCORE_RL_<NAME>``.

    Units: seconds and bytes, as the names say. Empty allow-lists allow everything.
    """

    rollouts: bool | None = None  # None: on, except in an app with an entrypoint or a websocket
    allowed_buckets: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    allowed_base_urls: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    # Of an agent that is trained as it is: further hosts of model APIs, and the policy's models. Empty: all chat models.
    model_hosts: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    policy_models: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    # The model of production calls. No address: a model of Amazon Bedrock.
    model_url: str = ""
    model_id: str = ""
    model_api_key: str = Field(default="", repr=False)
    heartbeat_s: Seconds = 30.0  # the client calls a session lost after three missed ones
    store_check_s: Seconds = 1.0  # how long the answer waits for the store to take the first heartbeat; 0: not at all
    put_timeout_s: Seconds = 900.0
    grace_s: Seconds = 20.0  # AgentCore kills about 60 s after SIGTERM, other hosts after 30
    max_record_bytes: int = 100_000_000
    probe: bool = True  # answer `agentcore-rl doctor`
    # Of SageMaker's multi-turn RL jobs. Failures of agent and infrastructure: reported as such, or as a reward of 0.
    sagemaker_failures: Failures = "failed"
    sagemaker_turn_rewards: bool = False  # a list of rewards is one per sample
    sagemaker_background: bool = False  # answer at once and not when the reward is reported

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> AgentSettings:
        """Read the environment. An empty variable is not set. Raises: ConfigError on a value that cannot be read."""
        env = os.environ if env is None else env
        given = {name: env.get(PREFIX + name.upper(), "").strip() for name in cls.__dataclass_fields__}
        values: dict[str, Any] = {name: text for name, text in given.items() if text}
        try:
            return cls(**values)
        except ValidationError as e:
            wrong = [f"{PREFIX}{str(x['loc'][0]).upper()}={x['input']!r}: {x['msg']}" for x in e.errors()]
            raise ConfigError("; ".join(wrong)) from e

    def check_base_url(self, url: Any) -> None:
        """Check an address against `allowed_base_urls`, which cover what is below them. Raises: ContractError."""
        place = _place(url) if isinstance(url, str) and "*" not in url else None
        for pattern in self.allowed_base_urls if url is not None else ():
            within = re.escape(_place(pattern) or pattern).replace(r"\*", "[^/.:]*")
            if place is not None and re.fullmatch(f"{within}(/.*)?", place):
                return
        if self.allowed_base_urls and url is not None:
            raise ContractError(f"this agent may not call {url!r}; {PREFIX}ALLOWED_BASE_URLS lists where it may")


def _place(url: str) -> str | None:
    """Return an address with its port, without a slash at its end, or None when URL parsers might read it differently."""
    if not _PLAIN_URL.fullmatch(url) or ".." in url:
        return None
    parts = urlsplit(url)
    with contextlib.suppress(ValueError):  # no such port
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return f"{parts.scheme}://{parts.hostname}:{port}{parts.path}".rstrip("/")
    return None

"""The agents a runtime serves: a name, a script, an environment, versions and endpoints."""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import ConfigError

NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,47}")


@dataclass(kw_only=True, eq=False)
class Agent:
    """A version of an agent. ``fields``: AWS's request fields that it was deployed with.

    ``python``: the interpreter of its environment, None before that is built. ``image``: a container image that is the agent;
    ``script`` and ``python`` are then not used. ``failure``: the reason why it did not load.
    """

    runtime_id: str
    version: int
    name: str
    script: Path
    python: Path | None = None
    image: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)
    idle_timeout_s: float = 900.0
    max_lifetime_s: float = 28_800.0
    created_s: float = field(default_factory=time.time)
    updated_s: float = field(default_factory=time.time)
    loaded: bool = False
    failure: str | None = None
    warned: bool = False  # its /ping was reported

    @property
    def status(self) -> str:
        """The status, by AWS's name."""
        if self.loaded:
            return "READY"
        verb = "CREAT" if self.version == 1 else "UPDAT"
        return f"{verb}ING" if self.failure is None else f"{verb}E_FAILED"

    @property
    def interpreter(self) -> Path:
        return self.python or Path(sys.executable)

    @property
    def key(self) -> tuple[str, int]:
        """The runtime's id and the version."""
        return self.runtime_id, self.version

    @property
    def env(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.fields.get("environmentVariables", {})
        return found

    @cached_property
    def header_allowlist(self) -> frozenset[bytes]:
        """The request headers that the agent gets in addition to the usual ones, in lower case."""
        names = self.fields.get("requestHeaderConfiguration", {}).get("requestHeaderAllowlist", [])
        return frozenset(name.lower().encode() for name in names)

    @property
    def folder(self) -> str:
        """The name of this version's folders of sessions and sockets. Short: sockets' paths are bounded."""
        return hashlib.sha256(f"{self.runtime_id}:{self.version}".encode()).hexdigest()[:10]


def make_runtime_id(name: str, salt: str) -> str:
    """Return ``name-`` and ten characters. They depend on the salt only, so a restarted runtime keeps its ARNs."""
    return f"{name}-{hashlib.sha256(f'{name}{chr(0)}{salt}'.encode()).hexdigest()[:10]}"


def runtime_arn(region: str, account_id: str, runtime_id: str) -> str:
    return f"arn:aws:bedrock-agentcore:{region}:{account_id}:runtime/{runtime_id}"


def parse_agent_option(text: str) -> tuple[str, Path]:
    """Parse ``NAME=PATH``. Raises: ConfigError when the name is not allowed or the file is not there."""
    name, sign, path = text.partition("=")
    if not sign or not NAME.fullmatch(name):
        raise ConfigError(
            f"--agent {text!r}: expected NAME=PATH.py, where NAME is a letter followed by up to 47 letters, digits or underscores"
        )
    script = Path(path).expanduser().resolve()
    if not script.is_file():
        raise ConfigError(f"--agent {text!r}: there is no file {script}")
    return name, script

"""The agents a runtime serves: a name, a script, an environment, versions and endpoints."""

from __future__ import annotations

import hashlib
import re
import string
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError

NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,47}")
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, kw_only=True)
class Agent:
    """One version of one agent.

    ``image``: a container image that is the agent; ``script`` and ``python`` are then not used. ``fields``: as it was deployed.
    """

    runtime_id: str
    version: int
    name: str
    script: Path
    python: Path = Path(sys.executable)
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    header_allowlist: frozenset[bytes] = frozenset()
    idle_timeout_s: float = 900.0
    max_lifetime_s: float = 28_800.0
    invocation_path: bytes = b"/invocations"
    pinged: bool = True  # False: its protocol has no /ping (MCP), so any answer to one is healthy
    warned: list[str] = field(default_factory=list, repr=False, compare=False)  # of its /ping

    @property
    def folder(self) -> str:
        """The name of this version's folders of sessions and sockets. Short: sockets' paths are bounded."""
        return hashlib.sha256(f"{self.runtime_id}:{self.version}".encode()).hexdigest()[:10]


def make_runtime_id(name: str, salt: str) -> str:
    """``name-`` and ten characters, the same for the same salt: a restarted runtime keeps its ARNs."""
    number = int.from_bytes(hashlib.sha256(f"{name}\0{salt}".encode()).digest(), "big")
    suffix = ""
    for _ in range(10):
        number, index = divmod(number, len(_ALPHABET))
        suffix += _ALPHABET[index]
    return f"{name}-{suffix}"


def runtime_arn(region: str, account_id: str, runtime_id: str) -> str:
    return f"arn:aws:bedrock-agentcore:{region}:{account_id}:runtime/{runtime_id}"


def parse_agent_option(text: str) -> tuple[str, Path]:
    """``NAME=PATH`` to its parts. Raises: ConfigError when the name is not allowed or the file is not there."""
    name, sign, path = text.partition("=")
    if not sign or not NAME.fullmatch(name):
        raise ConfigError(
            f"--agent {text!r}: expected NAME=PATH.py, where NAME is a letter followed by up to 47 letters, digits or underscores"
        )
    script = Path(path).expanduser().resolve()
    if not script.is_file():
        raise ConfigError(f"--agent {text!r}: there is no file {script}")
    return name, script

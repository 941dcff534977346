"""Texts of an agent that `agentcore-rl optimize` may change."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ..contract import ROLLOUT_FIELD, TEXTS_FIELD
from ..errors import ConfigError

FILE = "rollout_texts.json"

# The texts that the running rollout has read, by name. Its record lists them. None outside a rollout.
READ: ContextVar[dict[str, str] | None] = ContextVar("agentcore_rl_texts_read", default=None)


def rollout_text(payload: Mapping[str, Any], name: str, default: str) -> str:
    """Return a text of the agent, such as its system prompt, that `agentcore-rl optimize` may change.

    It is the text that the rollout tries, otherwise that of the agent's file of texts, otherwise ``default``. The file is
    `rollout_texts.json` next to the caller's file, or the path in AGENTCORE_RL_TEXTS: a JSON object with
    texts by name.

    Raises: ConfigError when that file is no object of texts.
    """
    named = os.environ.get("AGENTCORE_RL_TEXTS")
    file = Path(named) if named else Path(sys._getframe(1).f_code.co_filename).with_name(FILE)
    try:
        shipped = json.loads(file.read_text(encoding="utf-8")) if named or file.is_file() else {}
        text = {**shipped, **((payload.get(ROLLOUT_FIELD) or {}).get(TEXTS_FIELD) or {})}.get(name, default)
    except (OSError, ValueError, TypeError) as e:
        raise ConfigError(f"the file of texts {file} must be a JSON object with texts by name: {e}") from e
    if not isinstance(text, str):
        raise ConfigError(f"the text {name!r} in {file} must be a string, got {type(text).__name__}")
    read = READ.get()
    if read is not None:
        read[name] = text
    return text

"""What a session's calls are held to, checked when the session is opened."""

from __future__ import annotations

from typing import Any

import msgspec


class SessionSettings(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """What a session's calls are held to.

    ``sampling_params`` win over the agent's; ``max_tokens`` is an upper bound on what it asks for.
    """

    sampling_params: dict[str, Any] = {}
    model_id: str | None = None
    max_turns: int | None = None
    max_tokens: int | None = None
    allowed_models: list[str] | None = None
    metadata: dict[str, Any] = {}

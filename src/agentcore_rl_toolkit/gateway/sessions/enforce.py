"""What a session's settings make of a request: the trainer's sampling parameters win, and its limits hold."""

from __future__ import annotations

import msgspec

from ...contract import TURNS_USED
from ...messages.dialects import passthrough
from ...messages.dialects.passthrough import Fields
from ...messages.errors import RequestError
from .session import Session

_to_json = msgspec.json.Encoder().encode
_LENGTHS = ("max_tokens", "max_completion_tokens")


def hold_to_settings(session: Session, fields: Fields) -> None:
    """Change `fields` to what the session allows. Raises: RequestError where that cannot be done."""
    settings = session.settings
    if settings.max_turns is not None and session.started_turns >= settings.max_turns:
        raise RequestError(f"this session may make {settings.max_turns} {TURNS_USED}", kind="turn_limit")
    if settings.allowed_models is not None:
        model = fields.get("model")
        name = msgspec.json.decode(model) if model is not None else None
        if name not in settings.allowed_models:
            allowed = ", ".join(settings.allowed_models)
            raise RequestError(
                f"model {name!r} is not open to this session (allowed: {allowed})",
                kind="model_not_found",
                param="model",
            )
    if settings.model_id is not None:
        fields["model"] = msgspec.Raw(_to_json(settings.model_id))
    for key, value in session.overrides.items():
        if key == "max_tokens" and "max_completion_tokens" in fields:
            del fields["max_completion_tokens"]
        fields[key] = msgspec.Raw(value)
    if settings.max_tokens is not None:
        for key in _LENGTHS:
            if key in fields:
                asked = passthrough.number(fields[key])
                if asked is None or asked > settings.max_tokens:
                    fields[key] = msgspec.Raw(b"%d" % settings.max_tokens)
        if not any(key in fields for key in _LENGTHS):
            fields["max_tokens"] = msgspec.Raw(b"%d" % settings.max_tokens)

"""Which numbers of a reply an agent asked for: only those reach it, and its logprobs are kept in the engine's own words, so
that a repeated request gets them again.

Every call's logprobs are recorded as numbers. What an agent reads beside them (the tokens' texts, alternatives) is not in
there, and is kept only for calls whose agent asked.
"""

from __future__ import annotations

import msgspec

_NOTHING = (b"null", b"false")
_NUMBERS = frozenset(
    {"echo", "logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "top_logprobs"}
)


def wants_numbers(fields: dict[str, msgspec.Raw]) -> bool:
    """Whether the agent's request wants any of the numbers that the gateway asks the engine for anyway."""
    if _NUMBERS.isdisjoint(fields):
        return False
    return any(name in fields and bytes(fields[name]) not in _NOTHING for name in _NUMBERS)


def asked_for(fields: dict[str, msgspec.Raw]) -> bool:
    """Whether the agent's request wants them."""
    asked = fields.get("logprobs")
    return asked is not None and bytes(asked) not in _NOTHING

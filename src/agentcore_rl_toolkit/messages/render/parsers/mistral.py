"""Mistral from tokenizer v11 on: ``[TOOL_CALLS]NAME[ARGS]{...}``.

Source: the chat templates of mistralai/Mistral-Small-3.2-24B-Instruct-2506 and Ministral-3-14B-Reasoning-2512. No mark ends a
call, so the parser reads calls when the reply has ended.
"""

from __future__ import annotations

import json
import re

from .base import Call, Grammar, Schemas
from .families import named_call

_MARK = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_DECODER = json.JSONDecoder(strict=False)


def _call(body: str, at: int) -> tuple[Call, int] | None:
    """Return the call that follows a mark, and its end. None if it cannot be read, or is cut."""
    if (head := _HEAD.match(body, at)) is None:
        return None  # a name alone is prose
    try:
        end = _DECODER.raw_decode(body, head.end())[1]
    except (ValueError, RecursionError):
        return None
    calls = named_call(head[1], body[head.end() : end])
    return None if calls is None else (calls[0], end)


def _block(body: str, _: Schemas) -> list[Call | str] | None:
    found: list[Call | str] = []
    at = 0
    while at < len(body):
        read = _call(body, at)
        if read is None:
            # Each mark begins a separate call, so calls before an unreadable call are kept.
            return [*found, _MARK + body[at:]] if found else None
        after = body.find(_MARK, read[1])
        text = body[read[1] : after if after >= 0 else len(body)]
        found += [read[0], *([text] if text.strip() else [])]
        at = read[1] + len(text) + len(_MARK)
    return found or None


MISTRAL = Grammar(
    name="mistral",
    signs=((_MARK,),),
    reasoning=("[THINK]", "[/THINK]"),
    blocks=((_MARK, "[/TOOL_CALLS]"),),  # the second is in no vocabulary
    parse_block=_block,
    hints=(_MARK, "[ARGS]"),
    whole=lambda _inner: True,  # it is JSON, or it is not
    calls_end_reasoning=True,
)

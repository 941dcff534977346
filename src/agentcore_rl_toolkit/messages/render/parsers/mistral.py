"""Mistral: ``[TOOL_CALLS]NAME[ARGS]{...}`` from tokenizer v11 on, ``[TOOL_CALLS][{"name": ..., "arguments": ...}]`` before.

Source: the chat templates of mistralai/Mistral-Small-3.2-24B-Instruct-2506, Ministral-3-14B-Reasoning-2512 and
Mistral-Nemo-Instruct-2407. No mark ends a call, so the parser reads calls when the reply has ended.
"""

from __future__ import annotations

import json
import re

from .base import Call, Grammar, Schemas
from .families import call_from_json, inside_string, named_call

_MARK = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_LISTED = re.compile(r"\s*(?=\[)")  # the form before v11
_DECODER = json.JSONDecoder(strict=False)


def _calls(body: str, at: int) -> tuple[list[Call], int] | None:
    """Return the calls that follow a mark, and their end. None if they cannot be read, or are cut."""
    try:
        if (before := _LISTED.match(body, at)) is not None:
            listed, end = _DECODER.raw_decode(body, before.end())
            calls = [call_from_json(json.dumps(each, ensure_ascii=False)) for each in listed]
            return ([call for call in calls if call is not None], end) if calls and None not in calls else None
        if (head := _HEAD.match(body, at)) is None:
            return None  # a name alone is prose
        end = _DECODER.raw_decode(body, head.end())[1]
    except (ValueError, RecursionError):
        return None
    call = named_call(head[1], body[head.end() : end])
    return None if call is None else (call, end)


def _block(body: str, _: Schemas) -> list[Call | str] | None:
    found: list[Call | str] = []
    at = 0
    while at < len(body):
        read = _calls(body, at)
        if read is None:
            # Each mark begins separate calls, so calls before an unreadable call are kept.
            return [*found, _MARK + body[at:]] if found else None
        after = body.find(_MARK, read[1])
        text = body[read[1] : after if after >= 0 else len(body)]
        found += [*read[0], *([text] if text.strip() else [])]
        at = read[1] + len(text) + len(_MARK)
    return found or None


MISTRAL = Grammar(
    name="mistral",
    signs=((_MARK,),),
    reasoning=("[THINK]", "[/THINK]"),
    blocks=((_MARK, "[/TOOL_CALLS]"),),  # the second is in no vocabulary
    parse_block=_block,
    hints=(_MARK, "[ARGS]"),
    inside=inside_string,
    whole=lambda _inner: True,  # it is JSON, or it is not
    calls_end_reasoning=True,
)

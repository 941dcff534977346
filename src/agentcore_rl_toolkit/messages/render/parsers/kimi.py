"""Kimi K2: ``<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>`` in a section.

Source: the chat template of moonshotai/Kimi-K2-Instruct and its guide to tool calls. INDEX counts the calls of the
conversation. The ids of earlier calls must have this form too, because the model calls no tools otherwise.
"""

from __future__ import annotations

import re

from .base import Call, Grammar, Schemas
from .families import named_call

_ID = re.compile(r"\s*(?:functions\.)?([^\s:]+):\d+\s*\Z")


def _block(inner: str, _: Schemas) -> list[Call] | None:
    head, mark, body = inner.partition("<|tool_call_argument_begin|>")
    found = _ID.match(head)
    return named_call(found[1], body) if found is not None and mark else None


KIMI = Grammar(
    name="kimi",
    signs=(("<|tool_call_argument_begin|>",),),
    blocks=(("<|tool_call_begin|>", "<|tool_call_end|>"),),
    parse_block=_block,
    skip=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    hints=("<|tool_call_", "<|tool_calls_section_"),
    whole=lambda inner: inner.rstrip().endswith("}"),
    calls_end_reasoning=True,
    call_id="functions.{name}:{index}",
)

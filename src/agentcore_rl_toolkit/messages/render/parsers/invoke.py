"""Calls as ``<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>``: MiniMax M2 and Muse Glimmer.

Sources: the chat templates of MiniMaxAI/MiniMax-M2 and meta-models/Muse-Glimmer-30B. Strings are written as they are, and other
values as JSON. The tool's schema decides which of them a value is.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from .base import Call, Grammar, Schemas
from .channels import ChannelParser, Channels, Kind
from .families import named_call, typed_value

_NAME = r"""\sname\s*=\s*(?:"([^"]*)"|'([^']*)'|([^>\s="']+))\s*>"""


@functools.cache
def _patterns(prefix: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    # A closing tag counts where one can stand: values may hold the same words.
    opened, closed = f"<{prefix}parameter(?={_NAME})", f"</{prefix}parameter>"
    unclosed = "" if prefix else rf"|(?={opened})"
    parameter = rf"\s*<{prefix}parameter{_NAME}(.*?)(?:({closed})(?=\s*(?:{opened}|\Z)){unclosed})"
    return re.compile(rf"\s*<{prefix}invoke{_NAME}"), re.compile(parameter, re.DOTALL)


def read_invoke(block: str, schemas: Schemas, *, prefix: str = "") -> list[Call] | None:
    """Read one block, from ``<invoke`` to ``</invoke>``. None: it is not understood."""
    begin, parameter = _patterns(prefix)
    head = begin.match(block)
    if head is None:
        return None
    name = next(filter(None, head.groups()), "").strip()
    body, at = block[head.end() :].rstrip().removesuffix(f"</{prefix}invoke>"), 0
    types, arguments = schemas.get(name, {}), dict[str, Any]()
    while (match := parameter.match(body, at)) is not None:
        key = next(filter(None, match.groups()[:3]), "").strip()
        if match[5] is None and f"</{prefix}invoke>" in match[4]:
            return None  # the value continues into the next call
        arguments[key] = typed_value(match[4], types.get(key))
        at = match.end()
    return None if body[at:].strip() else named_call(name, arguments)


MINIMAX = Grammar(
    name="minimax",
    signs=(("<minimax:tool_call>",),),
    blocks=(("<invoke name=", "</invoke>"),),
    parse_block=read_invoke,
    skip=("<minimax:tool_call>", "</minimax:tool_call>"),
    hints=("<minimax:tool_call", "<invoke name="),
    calls_end_reasoning=True,
)

_TO = re.compile(r"\bto=([\w.\-]+)")
_INVOKE = re.compile(r"<atem:invoke\b.*?</atem:invoke>(?=\s*(?:<atem:invoke\b|</atem:function_calls>|\Z))", re.DOTALL)


def _kind(header: str, offered: bool) -> Kind:
    to = _TO.search(header)
    if to is not None and to[1] == "self":
        return "reasoning"
    return "text" if to is None or to[1] == "user" or not offered else "call"


def _calls(_: str, body: str, schemas: Schemas) -> list[Call] | None:
    found = [read_invoke(block, schemas, prefix="atem:") for block in _INVOKE.findall(body)]
    beside = re.sub(r"</?atem:function_calls>", "", _INVOKE.sub("", body))
    if not found or None in found or beside.strip():
        return None
    calls = [call for each in found for call in each or ()]
    # The template lists a tool NAME as the recipients NAME.*, so the model may call NAME.NAME.
    return [Call(n if n in schemas or h != t or h not in schemas else h, c.arguments)
            for c in calls for n in [c.name] for h, _, t in [n.partition(".")]]  # fmt: skip


MUSE = Grammar(
    name="muse",
    signs=(("<atem:invoke",),),
    parser=functools.partial(
        ChannelParser,
        channels=Channels(
            ends=("<|eom|>", "<|eot|>", "<|start|>"),
            kind=_kind,
            calls=_calls,
            noise=re.compile(r"^\s*assistant\b|(?:^|\s)to=[\w.\-]*\s*\Z"),
            header=re.compile(
                r"\s(?:to=[\w.\-]{0,300}|to?)?\Z"
            ),  # a longer name cannot be a tool's, so the parser does not wait for its end
        ),
    ),
    reasoning=None,
    hints=("<atem:",),
)

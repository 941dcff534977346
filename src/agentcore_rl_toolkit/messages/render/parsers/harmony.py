"""gpt-oss: the harmony format.

Source: github.com/openai/harmony. ``<|channel|>NAME [to=functions.TOOL] [<|constrain|>json]<|message|>BODY`` and then
``<|end|>`` and ``<|start|>assistant`` before the next one. The prompt ends with ``<|start|>assistant``. Channel
"analysis" is reasoning, "final" is the answer, "commentary" is a call when it has a recipient and a preamble for the
user when it has none.
"""

from __future__ import annotations

import functools
import re

from .base import Call, Grammar, Schemas
from .channels import ChannelParser, Channels, Kind
from .families import named_call

_TO = re.compile(r"\bto=(\S+?)(?=\s|<|$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def _kind(header: str, offered: bool) -> Kind:
    if offered and _TO.search(header):
        return "call"
    channel = _CHANNEL.search(header)
    return "reasoning" if channel is not None and channel[1] == "analysis" else "text"


def _calls(header: str, body: str, _: Schemas) -> list[Call] | None:
    recipient = _TO.search(header)
    name = recipient[1] if recipient else ""
    return named_call(name.removeprefix("functions."), body) if name.startswith("functions.") else None


_CHANNELS = Channels(
    ends=("<|end|>", "<|call|>", "<|return|>", "<|start|>"),
    kind=_kind,
    calls=_calls,
    noise=re.compile(r"<\|channel\|>\s*(?:(?:analysis|commentary|final)\s*\Z)?|^\s*assistant(?=<|\s*\Z)"),
)
HARMONY = Grammar(
    name="harmony",
    signs=(("<|channel|>", "<|message|>"),),
    parser=functools.partial(ChannelParser, channels=_CHANNELS),
    reasoning=None,
)

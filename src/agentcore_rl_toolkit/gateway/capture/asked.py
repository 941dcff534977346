"""Facts of a request: the role of its call (tools, tag, sampling parameters), and the numbers of the reply that its agent wants.

Only those numbers reach the agent. Its logprobs are kept in the engine's own form, so that a repeated request gets them again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec

TAG = "agentcore_rl_tag"  # among a recorded request's fields: the header or path segment; no engine gets it
LEFT_OUT = "agentcore_rl_left_out"  # likewise: what of the history the model did not get as sent, counted by kind
IMAGES = "images"  # the engine saw pixels that a trainer would not have

# A content part that is no text. In a string of JSON its quotes would be escaped.
_NO_TEXT = re.compile(rb'"(?:image_url|input_image|image_embeds|video_url|audio_url|input_audio)"')
_NOTHING = (b"null", b"false")
_NUMBERS = frozenset(
    {"echo", "logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "top_logprobs"}
)


class _Function(msgspec.Struct):
    name: str = ""


class _Tool(msgspec.Struct):
    function: _Function | None = None


class _Sampling(msgspec.Struct):
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class _Request(_Sampling, rename={"tag": TAG, "left_out": LEFT_OUT}):
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    tag: str | None = None
    left_out: dict[str, int] = {}


_decoder = msgspec.json.Decoder(_Request)


def read(request: bytes) -> dict[str, Any]:
    """Fields of a `Turn`, from a request as it is recorded; none when an engine took what is not understood here.

    A tool that the model must call is the form of an answer, and not offered.
    """
    try:
        asked = _decoder.decode(request)
    except msgspec.DecodeError:
        return {}
    tools = tuple(tool.function.name for tool in asked.tools or () if tool.function is not None)
    choice = asked.tool_choice
    named = isinstance(choice, dict) and choice.get("type") == "function"
    form = named or (choice == "required" and len(tools) == 1)
    return {
        "tools": () if form else tools,
        "tag": asked.tag,
        "left_out": asked.left_out,
        "sampling": {
            name: value for name in _Sampling.__struct_fields__ if (value := getattr(asked, name)) is not None
        },
    }


def system_of(messages: Sequence[dict[str, Any]]) -> str:
    """Stands for the leading system messages: the same for the same texts."""
    leading = []
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        leading.append(message.get("content"))
    return hashlib.blake2b(msgspec.json.encode(leading), digest_size=8).hexdigest()


def has_images(messages: bytes) -> bool:
    """Whether a message list, as JSON, has parts that no token stands for."""
    return _NO_TEXT.search(messages) is not None


def wants_numbers(fields: dict[str, msgspec.Raw]) -> bool:
    """Whether the agent's request wants any of the numbers that the gateway asks the engine for anyway."""
    if _NUMBERS.isdisjoint(fields):
        return False
    return any(name in fields and bytes(fields[name]) not in _NOTHING for name in _NUMBERS)


def wants_logprobs(fields: dict[str, msgspec.Raw]) -> bool:
    """Whether the agent's request wants the logprobs."""
    return bytes(fields.get("logprobs", b"null")) not in _NOTHING


def answered(message: Any) -> bool:
    """False for a reply that has nothing but reasoning."""
    if not isinstance(message, dict) or message.get("content") or message.get("tool_calls"):
        return True
    return not (message.get("reasoning_content") or message.get("reasoning"))

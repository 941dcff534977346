"""The form between all dialects: one request, one reply, and the deltas of a streamed reply.

Messages and tools keep the shape of OpenAI chat completions, which chat templates and engines take:
``{"role", "content", "tool_calls": [{"id", "type": "function", "function": {"name", "arguments": "<JSON text>"}}],
"tool_call_id", "reasoning_content"}`` and ``{"type": "function", "function": {"name", "description", "parameters"}}``.
``content`` is a string, or a list of parts (``text``, ``image_url``) if it has images.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .history import joined, unread_part

ParseStatus = Literal["none", "parsed", "unparsed"]

# Canonical finish reasons; engines' other words are passed on as they are.
STOP, LENGTH, TOOL_CALLS, CONTENT_FILTER = "stop", "length", "tool_calls", "content_filter"


def new_id(prefix: str) -> str:
    """Return a fresh id like the providers': ``prefix`` and 24 hexadecimal digits."""
    return prefix + secrets.token_hex(12)


_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


def own_id(prefix: str, reply_id: str, place: int | None = None) -> str:
    """Return the id, beginning with ``prefix``, of a reply, or of its part at ``place`` (counted from 0).

    It depends on the reply's id, so a recorded reply that is sent again has the same ids, streamed or not: clients take an id
    that they know for a message that they have. A reply without an id gets a fresh one every time.
    """
    if not reply_id:
        return new_id(prefix)
    tail = reply_id
    for other in _PREFIXES:
        tail = tail.removeprefix(other)
    return f"{prefix}{tail}" if place is None else f"{prefix}{tail}-{place}"


class ToolForm(msgspec.Struct, frozen=True):
    """The form in which an agent declared a tool. The model knows the tool as a function (`wire.responses`)."""

    kind: str
    name: str
    namespace: str | None = None


_LARGEST = 2**63 - 1  # an engine takes no larger number
Count = Annotated[int, Meta(ge=1, le=_LARGEST)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Share = Annotated[float, Meta(ge=0, le=1)]


class Sampling(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The agent's sampling parameters; None = not given. ``other`` has engine parameters that pass by name."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_LARGEST)] | None = None  # engines write "all tokens" as -1 or 0
    min_p: _Share | None = None
    seed: Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)] | None = None
    stop: list[str] = []
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0)] | None = None
    logit_bias: dict[str, Any] | None = None
    other: dict[str, Any] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return the given parameters, under vLLM's names."""
        given: dict[str, Any] = msgspec.to_builtins(self)
        given.pop("other", None)
        return {**given, **self.other}


# Sampling parameters that not every engine has, and the values at which they change nothing.
_ABILITIES: dict[str, Any] = {
    **{"seed": None, "min_p": 0, "logit_bias": {}, "top_k": -1},
    **{"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1},
}


class ModelRequest(msgspec.Struct, kw_only=True):
    """A call of an agent, in the same form for all dialects.

    ``tool_choice`` is "auto", "none", "required" or the name of a tool after "tool:". ``response_format`` has the
    chat shape. ``template_kwargs`` go to the chat template. ``include_thinking``: the reply contains the model's thinking.
    ``received_s`` is in unix seconds.
    """

    dialect: str
    model: str
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    tool_choice: str = "auto"
    parallel_tool_calls: bool | None = None
    stream: bool = False
    include_usage: bool = False
    include_thinking: bool = True
    n: int = 1
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    logprobs: bool = False
    top_logprobs: int = 0
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    template_kwargs: dict[str, Any] = {}
    counted: Usage | None = None  # the size of the prompt, if the gateway renders it
    forms: dict[str, ToolForm] = {}  # tools that the agent declared in another form, by the name of their function
    left_out: dict[str, int] = {}  # items, parts and fields of the history that the model does not get as sent, by kind
    unknown: dict[str, Any] = {}  # fields that nothing here reads
    received_s: float = 0.0  # some dialects report how long a reply took

    def leave_out_images(self) -> int:
        """Replace each image in the messages with a line of text. Return the number of images."""
        count = 0
        for place, message in enumerate(self.messages):
            content = message.get("content")
            parts = content if isinstance(content, list) else []
            if images := sum(part.get("type") == "image_url" for part in parts):
                shown = [unread_part("image") if part.get("type") == "image_url" else part for part in parts]
                self.messages[place] = {**message, "content": joined(shown)}
                count += images
        return count

    def template_options(self) -> dict[str, Any]:
        """Return the variables for the chat template: the agent's, and its reasoning effort by the templates' name."""
        options = dict(self.template_kwargs)
        if self.reasoning_effort is not None:
            options.setdefault("reasoning_effort", self.reasoning_effort)
            if self.reasoning_effort == "none":
                options.setdefault("enable_thinking", False)
        return options

    def features(self) -> list[str]:
        """Return the abilities that this request needs of an engine, by chat's names of the fields that ask for them."""
        sampling, form = self.sampling, self.response_format or {}
        asked = {
            "n": self.n > 1,
            "tool_choice": self.tools and self.tool_choice not in ("auto", "none"),
            "parallel_tool_calls": self.tools and self.parallel_tool_calls is False,
            "response_format": form.get("type", "text") != "text",
            **{name: getattr(sampling, name) not in (None, neutral) for name, neutral in _ABILITIES.items()},
            "stop": sampling.stop,
            **dict.fromkeys(sampling.other, True),
        }
        return [name for name, wanted in asked.items() if wanted]

    def to_chat_body(self) -> dict[str, Any]:
        """Convert the request to an OpenAI chat completion body, for engines that take messages."""
        body: dict[str, Any] = {"model": self.model, "messages": self.messages, **self.sampling.to_dict()}
        if self.tools:
            body["tools"] = self.tools
            if self.tool_choice.startswith("tool:"):
                body["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice[5:]}}
            elif self.tool_choice != "auto":
                body["tool_choice"] = self.tool_choice
            if self.parallel_tool_calls is not None:
                body["parallel_tool_calls"] = self.parallel_tool_calls
        more = {
            "n": self.n if self.n != 1 else None,
            "logprobs": self.logprobs or None,
            "top_logprobs": (self.logprobs and self.top_logprobs) or None,
            "response_format": self.response_format,
            "reasoning_effort": self.reasoning_effort,
            "chat_template_kwargs": self.template_kwargs or None,
            "stream": self.stream or None,
            "stream_options": {"include_usage": True} if self.stream else None,
        }
        body |= {name: value for name, value in more.items() if value is not None}
        return body


class ToolCall(msgspec.Struct, kw_only=True):
    """A finished tool call. ``arguments`` is JSON text, as the model wrote it where the engine gave it."""

    id: str
    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Usage(msgspec.Struct, kw_only=True):
    """Units: tokens. None = the engine did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None

    @property
    def cached(self) -> int:
        """The cached tokens of the prompt, never more than it has: some engines count whole blocks."""
        return max(min(self.cached_tokens or 0, self.prompt_tokens or 0), 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as chat completions have them."""
        prompt, completion = self.prompt_tokens or 0, self.completion_tokens or 0
        counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
        counts["total_tokens"] = prompt + completion
        if self.cached_tokens is not None:
            counts["prompt_tokens_details"] = {"cached_tokens": self.cached}
        if self.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return counts


class Choice(msgspec.Struct, kw_only=True):
    """An answer of a reply. ``logprob_entries`` are the engine's own ``logprobs.content`` objects, for agents that asked."""

    index: int = 0
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    finish_reason: str | None = None
    stop_sequence: str | None = None
    parse_status: ParseStatus = "none"
    logprob_entries: list[dict[str, Any]] | None = None

    def to_message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message


class Reply(msgspec.Struct, kw_only=True):
    """A finished answer. ``id`` is the engine's; ``created`` unix seconds."""

    id: str
    model: str = ""
    created: int = 0
    choices: list[Choice] = []
    usage: Usage | None = None


class ToolDelta(msgspec.Struct, kw_only=True):
    """A piece of a tool call: the first one of an ``index`` carries id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct, kw_only=True):
    """A piece of a streamed answer. Only what changed is set; ``usage`` comes at the end, for all choices.

    ``final``: all choices have ended with this piece. ``event`` is the server's own event, for an agent that gets it unchanged.
    """

    choice: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolDelta] = []
    finish_reason: str | None = None
    stop_sequence: str | None = None
    logprob_entries: list[dict[str, Any]] | None = None
    usage: Usage | None = None
    final: bool = False
    event: bytes = b""

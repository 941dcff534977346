"""Pass a call on to a server's chat completions, with the fields that the capture needs."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..messages.errors import RequestError, unsupported
from ..messages.wire import DIALECTS, Delta, ModelRequest, StreamEncoder, error_body, passthrough
from ..messages.wire.history import in_call_order
from .capture.record import CONSTRAINED, CallRecord
from .capture.replay import reply_of
from .capture.reply import ReplyReader
from .config import REFUSED_FORM
from .context import Engine

_to_json = msgspec.json.Encoder().encode


@dataclass(eq=False, repr=False)
class RelayedChat(Engine):
    """Asks a server for a chat completion, whatever the dialect of the agent, so all dialects leave the same records.

    ``passes``: the agent speaks the servers' dialect and gets their bytes.
    """

    _sent: bytes = b""
    _untrainable: str | None = None

    def __post_init__(self) -> None:
        self.passes = self.request.dialect == "chat"
        self._numbers = self.context.engine != "openai"  # a plain OpenAI endpoint has no token ids
        self._reply: ReplyReader

    def compose(self) -> None:
        request, context = self.request, self.context
        fields = request.fields
        if self.passes:
            passthrough.check(fields, more=context.allow_fields if self._numbers else None)
        else:
            asked = request.asked
            asked.messages = in_call_order(asked.messages)  # most chat templates write no ids
            for at, message in enumerate(asked.messages):
                if message["role"] == "developer":  # most chat templates leave out roles that they do not know
                    asked.messages[at] = {**message, "role": "system"}
                elif "reasoning_content" in message and self._numbers:  # vLLM 0.12 and later read the second name
                    asked.messages[at] = {**message, "reasoning": message["reasoning_content"]}
            fields = request.fields = {**asked.to_chat_body(), "messages": msgspec.Raw(_to_json(asked.messages))}
        if context.config.forced_tools != "constrain":
            for name in passthrough.asked_forms(fields):
                if context.config.forced_tools == "refuse":
                    raise unsupported(name, REFUSED_FORM)
                del fields[name]
                request.leave_out({name: 1})
        self.session.hold_to_settings(fields)
        field = passthrough.foreign(fields, context.allow_fields) if context.engine == "vllm" else None
        if field is not None:
            raise unsupported(field, f"the engine ({context.engine}) does not support this")
        numbers = {"logprobs": True, "return_token_ids": True} if self._numbers else {}
        self._sent = _to_json({**fields, **numbers})
        if passthrough.asked_forms(fields) and not context.config.train_constrained:
            self._untrainable = CONSTRAINED

    def attempt(self) -> ReplyReader:
        request = self.request
        self._reply = ReplyReader(
            path=b"/v1/chat/completions",
            body=self._sent,
            entries=bool(request.fields.get("logprobs")),
            n=request.fields.get("n") or 1,
            relayed=self.passes,
            plain=self._numbers and not request.numbers,
            reply_id=None if self.passes else request.reply_id,  # the agent's, also for a repeated request
            untrainable=self._untrainable,
        )
        return self._reply

    # -- the agent's reply

    def encoder(self) -> StreamEncoder:
        return PassedEvents(self._reply) if self.passes else super().encoder()

    def whole(self, record: CallRecord) -> bytes:
        if self.passes:
            return self._reply.answer
        reply = reply_of(record)
        for choice in reply.choices:
            choice.logprob_entries = self._reply.entries_of(choice.index)
        return DIALECTS[self.request.dialect].encode_reply(reply, self.request.asked)

    def replayed(self, record: CallRecord) -> bytes:
        if not self.passes:
            return super().replayed(record)
        options = self.request.fields.get("stream_options")
        usage = isinstance(options, dict) and options.get("include_usage") is True
        asked = ModelRequest(dialect="chat", model="", stream=self.request.stream, include_usage=usage)
        return DIALECTS["chat"].encode_reply(reply_of(record), asked)


class PassedEvents:
    """Writes a server's events as they are: a `StreamEncoder`."""

    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader

    def start(self) -> bytes:
        return b""

    def feed(self, delta: Delta) -> bytes:
        return delta.event

    def ping(self) -> bytes:
        return DIALECTS["chat"].idle

    def finish(self) -> bytes:
        return self._reader.rest

    def error(self, error: RequestError) -> bytes:
        return b"data: " + error_body("chat", error) + b"\n\n"

"""Calls over a server's own chat completions: the request is passed on, with the fields that the capture needs."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import msgspec

from ...logs import WarnsOnceAMinute
from ...messages.dialects import Delta, passthrough
from ...messages.dialects.passthrough import Fields
from ...messages.errors import unsupported
from ..capture.asked import IMAGES, has_images, wants_logprobs
from ..capture.events import gather
from ..capture.record import CONSTRAINED, Captured
from ..capture.reply import read_reply
from ..capture.stream import StreamReader, read_stream
from ..sessions.session import Session
from ..upstreams.router import Worker
from .agent import AgentSide, RelayingAgent, TranslatingAgent
from .context import Context
from .engine import Incoming
from .running import RunningCall

log = logging.getLogger(__name__)
_images = WarnsOnceAMinute(log)
_to_json = msgspec.json.Encoder().encode
_TRUE = msgspec.Raw(b"true")


class RelayedChat:
    """An `EngineSide`. A translated request is written as a chat completion, so every dialect leaves the same records."""

    def __init__(self, context: Context, session: Session, agent: AgentSide) -> None:
        self._context = context
        self._session = session
        self._agent = agent
        self._translating = (
            agent if type(agent) is TranslatingAgent else None
        )  # `isinstance` of an ABC runs Python code
        self.incoming = Incoming(context.running)
        self._body: tuple[bytes, ...] = ()
        self._carry: list[bytes] = []
        self._reader: StreamReader | None = None

    # -- the request

    def understand(self, body: bytes) -> Fields:
        agent, context, translating = self._agent, self._context, self._translating
        if translating is not None:
            session, store = self._session, context.sessions.store
            recorded = partial(session.replies.find, store, session.number)
            translating.understand(body, session.texts.translated, _as_sent, context.allow_fields, recorded)
            return translating.as_chat(_as_sent)
        more = context.allow_fields if context.engine != "openai" else None
        agent.n = passthrough.check(body, agent.fields, more=more)
        return agent.fields

    def compose(self, fields: Fields) -> None:
        """Asks for the tokens whatever the agent asked for; a plain OpenAI endpoint has none to give."""
        context, long = self._context, self._agent.long
        field = passthrough.foreign(fields, context.allow_fields) if context.engine == "vllm" else None
        if field is not None:
            raise unsupported(field, f"the inference engine ({context.engine}) has no such ability")
        if context.engine != "openai":
            fields["logprobs"] = fields["return_token_ids"] = _TRUE
        self._body = (_to_json(fields),) if long is None else long.pieces(fields)

    def prepare(self, owner: RunningCall, call_id: str) -> None:
        owner.go()

    def request_for(self, worker: Worker) -> tuple[bytes, tuple[bytes, ...]]:
        return b"/v1/chat/completions", self._body

    def stop(self, worker: Worker) -> None:
        """It stops when the connection closes."""

    # -- the reply

    def forget(self) -> None:
        self._reader = None
        self._carry = []

    def feed(self, data: bytes) -> list[Delta]:
        if self._reader is None:
            self._reader = StreamReader(entries=wants_logprobs(self._agent.fields))
        return self._reader.feed(gather(self._carry, data))

    def capture(self) -> Captured:
        incoming, agent = self.incoming, self._agent
        entries = wants_logprobs(agent.fields)
        reader = agent.reader if isinstance(agent, RelayingAgent) else self._reader
        if reader is not None:
            captured = reader.captured()
        elif agent.stream:
            captured = read_stream(incoming.parts, entries=entries)
        else:
            captured = read_reply(incoming.body(), entries=entries)
        if not self._context.train_constrained and passthrough.constrained(agent.fields):
            captured.untrainable = CONSTRAINED
        if has_images(agent.long.text if agent.long is not None else bytes(agent.fields.get("messages", b""))):
            captured.untrainable = IMAGES
            _images.warning(
                "session %s sends images or sound: the trainer would get neither, so these calls and those that go on from them "
                "are recorded and not trained",
                self._session.id,
            )
        if self._translating is not None:
            captured.reply_id = self._translating.reply_id  # what the agent gets, now and when it asks again
        return captured

    def release(self) -> None: ...


def _as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A developer's messages under the name that chat templates have for it: most leave out roles they do not know."""
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]

"""Samples a call by a server's own chat completions: the request is passed on, with the fields that the capture needs."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec

from ..logs import WarnsOnceAMinute
from ..messages.errors import unsupported
from ..messages.wire import Delta, passthrough
from ..messages.wire.passthrough import Fields
from .capture.record import CONSTRAINED, IMAGES, Captured
from .capture.reply import ReplyReader, without_numbers
from .config import REFUSED_FORM
from .context import Context
from .http.responses import passed
from .router import Worker, check_status, read_reply_body, too_large
from .sessions import Session
from .wire.request import CallRequest

log = logging.getLogger(__name__)
_images = WarnsOnceAMinute(log)
_to_json = msgspec.json.Encoder().encode
_TRUE = msgspec.Raw(b"true")
_ROUTE = b"/v1/chat/completions"


class RelayedChat:
    """An `Engine`. A translated request is written as a chat completion, so every dialect leaves the same records.

    ``passes``: the agent speaks the servers' dialect and gets their bytes. ``headers`` and ``body`` are the server's reply.
    """

    pings = False
    versions: tuple[int | None, int | None] | None = None

    def __init__(self, context: Context, session: Session, request: CallRequest) -> None:
        self._context = context
        self._session = session
        self._request = request
        self.passes = request.dialect == "chat"
        self.plain_endpoint = context.engine == "openai"
        self.headers: Mapping[str, str] = {}
        self.body = b""
        self._sent = b""
        self._reader: ReplyReader | None = None

    # -- the request

    def understand(self) -> Fields:
        request, context = self._request, self._context
        if self.passes:
            more, fields = context.allow_fields if context.engine != "openai" else None, request.fields
            passthrough.check(request.body, fields, more=more)
        else:
            asked = request.parse(self._session.reply)
            for at, message in enumerate(asked.messages):
                if message["role"] == "developer":  # most chat templates leave out roles that they do not know
                    asked.messages[at] = {**message, "role": "system"}
            fields = request.as_chat(context.allow_fields)
        if context.forced_tools != "constrain":
            for name in passthrough.asked_forms(fields):
                if context.forced_tools == "refuse":
                    raise unsupported(name, REFUSED_FORM)
                del fields[name]
                request.left_out[name] += 1
        return fields

    def compose(self, fields: Fields) -> None:
        """Ask for the tokens whatever the agent asked for; a plain OpenAI endpoint has none to give."""
        context = self._context
        field = passthrough.foreign(fields, context.allow_fields) if context.engine == "vllm" else None
        if field is not None:
            raise unsupported(field, f"the inference engine ({context.engine}) has no such ability")
        numbers = {} if self.plain_endpoint else {"logprobs": _TRUE, "return_token_ids": _TRUE}
        self._sent = _to_json({**fields, **numbers})

    @asynccontextmanager
    async def prompt(self, call_id: str) -> AsyncIterator[None]:
        yield

    # -- the reply

    async def sample(self, worker: Worker) -> AsyncGenerator[list[Delta], None]:
        request, most = self._request, self._context.limits.reply_bytes
        self._reader = None
        async with worker.post(_ROUTE, self._sent, session=self._session.id, stream=request.stream) as response:
            await check_status(response, most)
            self.headers = passed(response.headers)
            if not request.stream:
                self.body = await read_reply_body(response, most)
                return
            plain = not request.numbers and not self.plain_endpoint  # the agent did not ask for the numbers
            reader = self._reader = ReplyReader(entries=request.logprobs, n=request.n, relayed=self.passes, plain=plain)
            received = 0
            async for data in response.content.iter_any():
                received += len(data)
                if received > most:
                    raise too_large(most)
                yield reader.feed(data)

    @property
    def leftover(self) -> bytes:
        """The end of a stream that is no whole event."""
        return self._reader.rest if self._reader is not None else b""

    @property
    def ended(self) -> bool:
        """Whether some choice of a stream has ended."""
        return self._reader is not None and self._reader.ended

    def captured(self) -> Captured:
        request, reader = self._request, self._reader
        if reader is None:
            reader = ReplyReader(entries=request.logprobs)
            rest = reader.read(self.body)
            if not request.numbers:
                self.body = without_numbers(rest)
        captured = reader.captured()
        if not self._context.train_constrained and passthrough.constrained(request.fields):
            captured.untrainable = CONSTRAINED
        if request.images:
            captured.untrainable = IMAGES
            _images.warning(
                "session %s sends images or sound: the trainer would get neither, so these calls and those that go on from them "
                "are recorded and not trained",
                self._session.id,
            )
        if not self.passes:
            captured.reply_id = request.reply_id  # what the agent gets, now and when it asks again
        return captured

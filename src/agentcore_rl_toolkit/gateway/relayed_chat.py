"""Pass a call on to a server's chat completions, with the fields that the capture needs."""

from __future__ import annotations

import msgspec

from ..messages.errors import unsupported
from ..messages.wire import Delta, passthrough
from ..messages.wire.passthrough import Fields
from .capture.record import CONSTRAINED, Captured
from .capture.reply import ReplyReader
from .config import REFUSED_FORM
from .context import Context, Engine
from .http.request import CallRequest
from .router import Worker
from .sessions import Session

_to_json = msgspec.json.Encoder().encode
_ROUTE = b"/v1/chat/completions"


class RelayedChat(Engine):
    """Asks a server for a chat completion, whatever the dialect of the agent, so all dialects leave the same records.

    ``passes``: the agent speaks the servers' dialect and gets their bytes. ``body`` is the server's reply.
    """

    def __init__(self, context: Context, session: Session, request: CallRequest) -> None:
        self._context = context
        self._session = session
        self._request = request
        self.passes = request.dialect == "chat"
        self.plain_endpoint = context.engine == "openai"
        self.body = b""
        self._sent = b""
        self._constrained = False
        self.reader: ReplyReader

    # -- the request

    def understand(self) -> Fields:
        request, context = self._request, self._context
        if self.passes:
            fields = request.read()
            passthrough.check(fields, more=None if self.plain_endpoint else context.allow_fields)
        else:
            asked = request.parse(self._session.replies.find)
            for at, message in enumerate(asked.messages):
                if message["role"] == "developer":  # most chat templates leave out roles that they do not know
                    asked.messages[at] = {**message, "role": "system"}
            fields = request.as_chat(context.allow_fields)
        if context.config.forced_tools != "constrain":
            for name in passthrough.asked_forms(fields):
                if context.config.forced_tools == "refuse":
                    raise unsupported(name, REFUSED_FORM)
                del fields[name]
                request.leave_out({name: 1})
        return fields

    def compose(self, fields: Fields) -> None:
        """Ask for the tokens in every request, except of a plain OpenAI endpoint, which has none."""
        context = self._context
        field = passthrough.foreign(fields, context.allow_fields) if context.engine == "vllm" else None
        if field is not None:
            raise unsupported(field, f"the engine ({context.engine}) does not support this")
        numbers = {} if self.plain_endpoint else {"logprobs": True, "return_token_ids": True}
        self._sent = _to_json({**fields, **numbers})
        self._constrained = bool(passthrough.asked_forms(fields))

    # -- the reply

    def request(self, worker: Worker) -> tuple[bytes, bytes]:
        request = self._request
        plain = not request.numbers and not self.plain_endpoint  # the agent did not ask for the numbers
        entries, n = bool(request.fields.get("logprobs")), request.fields.get("n") or 1
        self.reader = ReplyReader(entries=entries, n=n, relayed=self.passes, plain=plain)
        return _ROUTE, self._sent

    def read(self, body: bytes) -> None:
        self.body = body

    def feed(self, data: bytes) -> list[Delta]:
        return self.reader.feed(data)

    def captured(self) -> Captured:
        request = self._request
        if not request.stream:
            self.body = self.reader.read(self.body)
        captured = self.reader.captured()
        if self._constrained and not self._context.config.train_constrained:
            captured.untrainable = CONSTRAINED
        if not self.passes:
            captured.reply_id = request.reply_id  # the agent's reply, also for a repeated request
        return captured

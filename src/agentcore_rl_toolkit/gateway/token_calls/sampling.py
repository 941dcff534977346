"""Sample a call by token ids: the gateway renders the messages, the engine samples ids, and the gateway parses them.

The prompt of turn k+1 is the prompt and completion of turn k with a suffix, token for token (`render`). Threads render all but
short requests. The cost grows with the new messages, not with the session. The calls of a session are rendered one after the
other.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from typing import Any

import msgspec

from ...errors import CaptureError
from ...messages.errors import NOT_JSON, RequestError
from ...messages.render import AnswerForm, Conversation, RenderedPrompt
from ...messages.wire import Delta, chat, context_overflow
from ...messages.wire.canonical import Usage
from ...messages.wire.history import without_images
from ...messages.wire.passthrough import Fields
from ..capture.events import EventReader
from ..capture.record import CONSTRAINED, Captured
from ..context import Context, Engine
from ..engines import TOKEN_ENGINES, Piece, ReadPieces, TokenRequest
from ..http.request import CallRequest
from ..router import Worker
from ..sessions import Session
from .histories import History
from .mode import TokenMode, constrained
from .reply import TokenReply

log = logging.getLogger(__name__)

SHORT_BYTES = 4096  # rendering a shorter request takes less time than its way to a thread and back
_to_json = msgspec.json.Encoder().encode


class TokenSampling(Engine):
    """Asks a server for token ids."""

    def __init__(self, context: Context, session: Session, request: CallRequest, mode: TokenMode) -> None:
        self._context = context
        self._session = session
        self._request = request
        self._mode = mode
        self._call_id = ""
        self._prompt: RenderedPrompt | None = None
        self._prompt_json = b"[]"
        self._max_tokens = 0
        self._answers: list[tuple[str, list[int], dict[str, Any]]] = []
        self._form: AnswerForm | None = None
        self._history: History | None = None
        self._worker: Worker | None = None
        self._name = ""
        self._reply: TokenReply
        self._read: ReadPieces
        self._events: EventReader | None = None  # the reader of a stream
        self._error: dict[str, Any] | None = None  # as the engine reports it inside a reply

    # -- the request

    def understand(self) -> Fields:
        request = self._request
        asked = request.parse(self._session.replies.find)
        asked.messages, images = without_images(asked.messages)  # token ids have none
        if images:
            request.leave_out({"image": images})
        return request.as_chat(self._context.allow_fields)

    def compose(self, fields: Fields) -> None:
        asked, session = self._request.asked, self._session
        if session.settings.overrides:
            chat.overlay(asked, fields)
        if session.settings.model_id is not None:
            asked.model = session.settings.model_id
        if wishes := self._mode.require(asked):
            self._request.leave_out(wishes)

    async def prepare(self, call_id: str) -> None:
        """Render the prompt after the prompts of the session's earlier calls."""
        mode, self._call_id = self._mode, call_id
        history = self._history = mode.histories.pin(self._session)
        async with history.order:
            conversation = history.conversation or await mode.histories.open(history)
            try:
                if len(self._request.body) <= SHORT_BYTES:
                    self._render(conversation)
                else:
                    loop = asyncio.get_running_loop()
                    await _completed(loop.run_in_executor(mode.executor, self._render, conversation))
            except RecursionError as e:
                raise RequestError("the request is nested too deeply") from e

    async def release(self, *, stored: bool) -> None:
        """Add the choices to the history. Nothing can continue from a call that is not stored."""
        if (history := self._history) is None:
            return
        try:
            async with history.order:  # a thread may have the conversation
                if history.conversation is not None:
                    self._continue(history.conversation, self._answers if stored else [])
        finally:
            self._mode.histories.unpin(history)

    def _render(self, conversation: Conversation) -> None:
        """Make the prompt. Raises: RequestError if the template refuses it, or if it leaves no room for an answer."""
        asked, settings, mode = self._request.asked, self._session.settings, self._mode
        prompt = self._prompt = mode.renderer.render(
            conversation, asked.messages, asked.tools or None, asked.template_options() or None
        )
        asked.counted = Usage(prompt_tokens=prompt.length, cached_tokens=prompt.reused_tokens)
        self._prompt_json = prompt.json
        self._form = mode.form(asked, opens_reasoning=prompt.opens_reasoning)
        given = asked.sampling.max_tokens
        wanted, context_tokens = given or mode.config.limits.default_max_tokens, mode.config.context_tokens
        bound = min(wanted, settings.max_tokens or wanted)
        if context_tokens is not None:
            room = context_tokens - prompt.length
            if room < 1 or (given is not None and bound > room):
                most = None if given is None else bound
                raise context_overflow(prompt.length, context_tokens, max_tokens=most)
            bound = min(bound, room)
        self._max_tokens = bound

    def _continue(self, conversation: Conversation, answers: list[tuple[str, list[int], dict[str, Any]]]) -> None:
        """Add the choices to the history. Without one, the history is as it was before the call."""
        prompt, renderer = self._prompt, self._mode.renderer
        if prompt is None:
            return
        try:
            for place, (turn_id, ids, message) in enumerate(answers, 1):
                more = place < len(answers)
                renderer.commit(conversation, prompt, array("I", ids), message, turn_id=turn_id, more=more)
            if not answers:
                renderer.abandon(conversation, prompt)
        except Exception:
            log.exception("call %s is not in the history of session %s", self._call_id, self._session.id)

    # -- the reply

    def request(self, worker: Worker) -> tuple[bytes, bytes] | None:
        request, mode, self._worker = self._request, self._mode, worker
        other = request.asked.sampling.other
        stops = frozenset() if other.get("ignore_eos") else mode.renderer.stop_token_ids
        self._reply = TokenReply(mode.renderer, request.asked, self._prompt)
        engine = TOKEN_ENGINES[self._context.engine]
        self._read, self._error = engine.reader(), None
        self._events = EventReader() if request.stream else None
        self._name = f"{self._call_id}-{secrets.token_hex(4)}"  # a server refuses a name that it is still sampling
        wanted = TokenRequest(
            prompt=self._prompt_json,
            asked=request.asked,
            name=self._name,
            max_tokens=self._max_tokens,
            stop_token_ids=sorted(stops.union(other.get("stop_token_ids") or ())),
            stream=request.stream,
        )
        return engine.request(wanted)

    def read(self, body: bytes) -> None:
        self.feed(body)

    def feed(self, data: bytes) -> list[Delta]:
        events = [data] if self._events is None else self._events.feed(data)
        try:
            return self._add([piece for event in events for piece in self._read(event)])
        except NOT_JSON as e:
            raise CaptureError(f"the engine's reply cannot be read: {e}") from e

    def cancel(self, worker: Worker) -> None:
        if (cancel := TOKEN_ENGINES[self._context.engine].cancel) is not None:
            self._mode.cancel(worker, *cancel(self._name))

    def _add(self, pieces: list[Piece]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in _joined(pieces):
            if piece.error is not None:
                self._error = piece.error
                continue
            if piece.weight_version is not None and self._worker is not None:
                self._worker.report_weights(piece.weight_version)
            deltas += self._reply.add(piece)
        return deltas

    def captured(self) -> Captured:
        request = self._request
        captured = Captured(
            choices=[],
            has_tokens=True,
            prompt=self._prompt_json,
            reply_id=request.reply_id,
            model=request.asked.model,
        )
        if self._error is not None:
            captured.error = _to_json(self._error)
        if not self._context.config.train_constrained:
            if self._form is None and constrained(request.asked):
                captured.untrainable = CONSTRAINED
            self._reply.form = self._form
        self._reply.record(captured)
        if captured.complete and captured.error is None:
            self._answers = self._reply.answers(self._call_id)
        if self._answers and self._prompt is not None:
            captured.parent_turn, captured.branch_reason = self._prompt.parent_turn, self._prompt.branch_reason
        return captured


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Join pieces of a choice that came together: their text is parsed and sent at once."""
    joined: list[Piece] = []
    for piece in pieces:
        before = joined[-1] if joined else piece
        if before is piece or before.finish_reason is not None or _kind(before) != _kind(piece):
            joined.append(piece)
            continue
        before.ids += piece.ids
        if before.logprobs is not None:
            before.logprobs += piece.logprobs or ()
        before.finish_reason, before.stop_sequence = piece.finish_reason, piece.stop_sequence
        before.routed_experts = piece.routed_experts or before.routed_experts
    return joined


def _kind(piece: Piece) -> tuple[Any, ...]:
    first, last = piece.weight_version_first, piece.weight_version
    return piece.choice, first, last, piece.spans, piece.error, piece.logprobs is None


async def _completed(work: asyncio.Future[None]) -> None:
    """Wait for a thread, also if the call is cancelled: the thread uses the conversation until then."""
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise

"""Calls in which the gateway does the tokenising: messages become token ids here, the engine samples ids, ids become
the reply.

Turn k+1's prompt is turn k's prompt and completion with the new suffix behind it, token for token (`render`). Rendering
runs in threads; its cost grows with the new messages, not with the session. Calls of one session are rendered one after the
other.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from ...messages.render import AnswerForm, Conversation, RenderedPrompt
from ...messages.wire import Delta, chat, context_overflow, passthrough
from ...messages.wire.canonical import Usage
from ...messages.wire.history import without_images
from ...messages.wire.passthrough import Fields
from ..capture.record import CONSTRAINED, Captured
from ..context import Context
from ..engines import GenerationStream, Piece, constrained
from ..router import Worker, check_status, read_reply_body
from ..sessions import Session
from ..wire.request import CallRequest
from .mode import TokenMode
from .reply import TokenReply

log = logging.getLogger(__name__)

_to_json = msgspec.json.Encoder().encode


class TokenSampling:
    """An `Engine`, over servers that take and give token ids."""

    pings = False
    versions: tuple[int | None, int | None] | None = None

    def __init__(self, context: Context, session: Session, request: CallRequest, mode: TokenMode) -> None:
        self._context = context
        self._session = session
        self._request = request
        self._mode = mode
        self._engine = mode.engine
        self._call_id = ""
        self._prompt: RenderedPrompt | None = None
        self._answers: list[tuple[str, list[int], dict[str, Any]]] = []
        self._path = b""
        self._body = b""
        self._reader: GenerationStream | None = None
        self._form: AnswerForm | None = None
        self._reply = TokenReply(mode.renderer, request.asked, None)

    # -- the request

    def understand(self) -> Fields:
        request, session = self._request, self._session
        fields = request.translate(self._text_only, self._context.allow_fields, session.reply)
        if session.overrides:
            passthrough.overlay(fields, session.overrides)
            chat.overlay(request.asked, fields)
        request.n = request.asked.n
        request.left_out += self._mode.require(request.asked)
        return fields

    def _text_only(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with a line of text in place of each image: token ids have none."""
        messages, images = without_images(messages)
        self._request.left_out += Counter({"image": images} if images else {})
        return messages

    def compose(self, fields: Fields) -> None:
        """The request needs the prompt, which is made later."""
        if self._session.settings.model_id is not None:
            self._request.asked.model = self._session.settings.model_id

    @asynccontextmanager
    async def prompt(self, call_id: str) -> AsyncIterator[None]:
        """Render the prompt when the session's calls before this one are rendered. The answers become part of the history."""
        mode, self._call_id = self._mode, call_id
        history = mode.histories.pin(self._session)
        try:
            async with history.order:
                conversation = await mode.histories.open(history)
                rendering = asyncio.get_running_loop().run_in_executor(mode.executor, self._render, conversation)
                await _completed(rendering)
            if self._prompt is not None:
                self._form = mode.form(self._request.asked, opens_reasoning=self._prompt.opens_reasoning)
            self.reset()
            self._path, self._body = self._engine.request(
                self._prompt_json,
                self._request.asked,
                max_tokens=self._max_tokens(),
                stop_token_ids=sorted(mode.renderer.stop_token_ids),
                stream=self._request.stream and self._engine.streams,
            )
            yield
        except BaseException:
            self._answers = []  # nothing can go on from a call that is not stored
            raise
        finally:
            try:
                async with history.order:  # a thread may have the conversation
                    if history.conversation is not None:
                        self._continue(history.conversation)
            finally:
                mode.histories.unpin(history)

    def _render(self, conversation: Conversation) -> None:
        asked = self._request.asked
        prompt = self._prompt = self._mode.renderer.render(
            conversation, asked.messages, asked.tools or None, asked.template_options() or None
        )
        asked.counted = Usage(prompt_tokens=prompt.length, cached_tokens=prompt.reused_tokens)

    def _continue(self, conversation: Conversation) -> None:
        """Add the answers to the history; without one the session stands where it stood before."""
        prompt, renderer = self._prompt, self._mode.renderer
        if prompt is None:
            return
        try:
            for place, (turn_id, ids, message) in enumerate(self._answers, 1):
                more = place < len(self._answers)
                renderer.commit(conversation, prompt, array("I", ids), message, turn_id=turn_id, more=more)
            if not self._answers:
                renderer.abandon(conversation, prompt)
        except Exception:
            log.exception("call %s is not in the history of session %s", self._call_id, self._session.id)

    @property
    def _prompt_json(self) -> bytes:
        return self._prompt.json if self._prompt is not None else b"[]"

    def _max_tokens(self) -> int:
        """Raises: RequestError when the prompt leaves no room for an answer."""
        asked, settings = self._request.asked.sampling.max_tokens, self._session.settings
        bound = min(asked or self._mode.max_tokens, settings.max_tokens or asked or self._mode.max_tokens)
        window, counted = self._mode.context_tokens, self._request.asked.counted
        size = counted.prompt_tokens if counted is not None else None
        if window is None or size is None:
            return bound
        room = window - size
        if room < 1 or (asked is not None and bound > room):
            raise context_overflow(size, window, max_tokens=bound if asked is not None else None)
        return min(bound, room)

    # -- the reply

    def reset(self) -> None:
        self._reader = None
        self._reply = TokenReply(self._mode.renderer, self._request.asked, self._prompt)

    async def sample(self, worker: Worker) -> AsyncGenerator[list[Delta], None]:
        name = f"{self._call_id}-{secrets.token_hex(4)}"
        body, stream = self._engine.named(self._body, name), self._request.stream
        most = self._context.limits.reply_bytes
        try:
            async with worker.post(self._path, body, session=self._session.id, stream=stream) as response:
                await check_status(response, most)
                if not stream:
                    pieces = self._engine.reply(await read_reply_body(response, most))
                    yield self._take(worker, pieces)
                    return
                reader = self._reader = self._engine.stream()
                async for data in response.content.iter_any():
                    yield self._take(worker, reader.feed(data))
        except (asyncio.CancelledError, GeneratorExit):
            if (ending := self._engine.cancel(name)) is not None:
                self._mode.cancel(worker, *ending)
            raise

    def _take(self, worker: Worker | None, pieces: list[Piece]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            if piece.weights is not None and worker is not None:
                worker.report_weights(piece.weights)
            deltas += self._reply.take(piece)
        return deltas

    def captured(self) -> Captured:
        request = self._request
        captured = Captured(choices=[], has_tokens=True, reply_id=request.reply_id, model=request.asked.model)
        captured.prompt = self._prompt_json
        if self._reader is not None and self._reader.error is not None:
            captured.error = _to_json(self._reader.error)
        if not self._context.train_constrained:
            if self._form is None and constrained(request.asked):
                captured.untrainable = CONSTRAINED
            self._reply.form = self._form
        self._reply.record(captured)
        if captured.complete and captured.error is None:
            self._answers = self._reply.answers(self._call_id)
        if self._answers and self._prompt is not None:
            captured.parent_turn, captured.branch_reason = self._prompt.parent_turn, self._prompt.branch_reason
        return captured


async def _completed(work: asyncio.Future[None]) -> None:
    """Wait for a thread, also if the call is cancelled: the thread uses the conversation until then."""
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():  # a deadline may cancel a call that is aborted already
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        raise

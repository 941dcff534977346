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
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from ...messages.render import AnswerForm, Conversation, RenderedPrompt
from ...messages.wire import Delta, chat, context_overflow
from ...messages.wire.canonical import Usage
from ...messages.wire.history import without_images
from ...messages.wire.passthrough import Fields
from ..capture.record import CONSTRAINED, Captured
from ..context import Context
from ..engines import TOKEN_ENGINES, GenerationStream, Piece
from ..router import Worker, check_status, read_reply_body
from ..sessions import Session
from ..wire.request import CallRequest
from .mode import TokenMode, constrained
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
        self._call_id = ""
        self._prompt: RenderedPrompt | None = None
        self._prompt_json = b"[]"
        self._max_tokens = 0
        self._answers: list[tuple[str, list[int], dict[str, Any]]] = []
        self._reader: GenerationStream | None = None
        self._form: AnswerForm | None = None
        self._reply: TokenReply

    # -- the request

    def understand(self) -> Fields:
        request = self._request
        asked = request.parse(self._session.reply)
        asked.messages, images = without_images(asked.messages)  # token ids have none
        if images:
            request.left_out["image"] += images
        return request.as_chat(self._context.allow_fields)

    def compose(self, fields: Fields) -> None:
        asked, session = self._request.asked, self._session
        if session.settings.overrides:
            chat.overlay(asked, fields)
        if session.settings.model_id is not None:
            asked.model = session.settings.model_id
        self._request.left_out += self._mode.require(asked)

    @asynccontextmanager
    async def prompt(self, call_id: str) -> AsyncIterator[None]:
        """Render the prompt when the session's calls before this one are rendered. The answers become part of the history."""
        mode, self._call_id = self._mode, call_id
        history = mode.histories.pin(self._session)
        try:
            async with history.order:
                conversation = history.conversation or await mode.histories.open(history)
                rendering = asyncio.get_running_loop().run_in_executor(mode.executor, self._render, conversation)
                await _completed(rendering)
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
        """Make the prompt. Raises: RequestError if the template refuses it, or if it leaves no room for an answer."""
        asked, settings, mode = self._request.asked, self._session.settings, self._mode
        prompt = self._prompt = mode.renderer.render(
            conversation, asked.messages, asked.tools or None, asked.template_options() or None
        )
        asked.counted = Usage(prompt_tokens=prompt.length, cached_tokens=prompt.reused_tokens)
        self._prompt_json = prompt.json
        self._form = mode.form(asked, opens_reasoning=prompt.opens_reasoning)
        given = asked.sampling.max_tokens
        bound = min(given or mode.max_tokens, settings.max_tokens or given or mode.max_tokens)
        if mode.context_tokens is not None:
            room = mode.context_tokens - prompt.length
            if room < 1 or (given is not None and bound > room):
                most = None if given is None else bound
                raise context_overflow(prompt.length, mode.context_tokens, max_tokens=most)
            bound = min(bound, room)
        self._max_tokens = bound

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

    # -- the reply

    async def sample(self, worker: Worker) -> AsyncGenerator[list[Delta], None]:
        request, most = self._request, self._context.limits.reply_bytes
        self._reply, self._reader = TokenReply(self._mode.renderer, request.asked, self._prompt), None
        other = request.asked.sampling.other
        stops = frozenset() if other.get("ignore_eos") else self._mode.renderer.stop_token_ids
        engine, name = TOKEN_ENGINES[self._context.engine], f"{self._call_id}-{secrets.token_hex(4)}"
        path, body = engine.request(
            self._prompt_json,
            request.asked,
            name=name,  # one for each attempt: an engine refuses a name that is under way
            max_tokens=self._max_tokens,
            stop_token_ids=sorted(stops.union(other.get("stop_token_ids") or ())),
            stream=request.stream,
        )
        try:
            async with worker.post(path, body, session=self._session.id, stream=request.stream) as response:
                await check_status(response, most)
                if not request.stream:
                    self._add(worker, engine.reply(await read_reply_body(response, most)))
                    return
                reader = self._reader = engine.stream()
                async for data in response.content.iter_any():
                    yield self._add(worker, reader.feed(data))
        except (asyncio.CancelledError, GeneratorExit):
            if (ending := engine.cancel(name)) is not None:
                self._mode.cancel(worker, *ending)
            raise

    def _add(self, worker: Worker | None, pieces: list[Piece]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            if piece.weights is not None and worker is not None:
                worker.report_weights(piece.weights)
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

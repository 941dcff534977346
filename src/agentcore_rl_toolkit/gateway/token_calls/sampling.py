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
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...messages.errors import RequestError
from ...messages.render import AnswerForm, Conversation, RenderedPrompt
from ...messages.wire import DIALECTS, Reply, chat, context_overflow
from ...messages.wire.canonical import Usage
from ..capture.record import CONSTRAINED, CallRecord
from ..context import Engine
from ..engines import TOKEN_ENGINES, TokenRequest
from ..router import Worker
from .mode import History, TokenMode, constrained
from .reply import TokenReply

log = logging.getLogger(__name__)

SHORT_BYTES = 4096  # rendering a shorter request takes less time than its way to a thread and back
_to_json = msgspec.json.Encoder().encode


@dataclass(eq=False, repr=False)
class TokenSampling(Engine):
    """Asks a server for token ids."""

    mode: TokenMode
    _call_id: str = ""
    _prompt: RenderedPrompt | None = None
    _features: list[str] = field(default_factory=list)  # those that not every engine has
    _options: dict[str, Any] = field(default_factory=dict)  # variables of the chat template
    _sampling: dict[str, Any] = field(default_factory=dict)
    _max_tokens: int = 0
    _form: AnswerForm | None = None
    _untrainable: str | None = None
    _history: History | None = None
    _name: str = ""
    _reply: TokenReply | None = None

    def compose(self) -> None:
        request, session = self.request, self.session
        asked, settings = request.asked, session.settings
        if images := asked.leave_out_images():  # token ids have none
            request.leave_out({"image": images})
        fields = request.fields = {**asked.to_chat_body(), "messages": msgspec.Raw(_to_json(asked.messages))}
        session.hold_to_settings(fields)
        if settings.overrides:
            chat.overlay(asked, fields)
        asked.sampling.seed = fields.get("seed")
        if settings.model_id is not None:
            asked.model = settings.model_id
        if asked.tool_choice == "none":
            asked.parallel_tool_calls = None
        self._features, self._options = asked.features(), asked.template_options()
        if self._features:
            request.leave_out(self.mode.require(asked, self._features))
        self._sampling = asked.sampling.to_dict()

    async def prepare(self, call_id: str) -> None:
        """Render the prompt after the prompts of the session's earlier calls."""
        self._call_id = call_id
        history = self._history = self.session.history or self.mode.history(self.session)
        async with history.order:
            try:
                if max(len(self.request.body), len(self.request.fields["messages"])) <= SHORT_BYTES:
                    self._render(history.conversation)
                else:
                    loop = asyncio.get_running_loop()
                    await _completed(loop.run_in_executor(self.mode.executor, self._render, history.conversation))
            except RecursionError as e:
                raise RequestError("the request is nested too deeply") from e

    async def release(self, *, stored: bool) -> None:
        """Add the choices to the history. Nothing can continue from a call that is not stored."""
        prompt = self._prompt
        if self._history is None or prompt is None:
            return
        async with self._history.order:  # a thread may have the conversation
            conversation = self._history.conversation
            answers = self._reply.answers if stored and self._reply is not None else []
            try:
                for place, (index, ids, message) in enumerate(answers, 1):
                    turn_id = self._call_id if len(answers) == 1 else f"{self._call_id}.{index}"
                    more = place < len(answers)
                    conversation.commit(prompt, array("I", ids), message, turn_id=turn_id, more=more)
                if not answers:
                    conversation.abandon(prompt)  # the history is as it was before the call
            except Exception:
                log.exception("call %s is not in the history of session %s", self._call_id, self.session.id)

    def _render(self, conversation: Conversation) -> None:
        """Make the prompt. Raises: RequestError if the template refuses it, or if it leaves no room for an answer."""
        asked, settings, mode = self.request.asked, self.session.settings, self.mode
        prompt = self._prompt = mode.renderer.render(
            conversation, asked.messages, asked.tools or None, self._options or None
        )
        asked.counted = Usage(prompt_tokens=prompt.length, cached_tokens=prompt.reused_tokens)
        if self._features:
            form = mode.form(asked, opens_reasoning=prompt.opens_reasoning)
            if not mode.config.train_constrained:
                self._form = form
                self._untrainable = CONSTRAINED if form is None and constrained(asked) else None
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

    # -- the reply

    def attempt(self) -> TokenReply:
        request, mode = self.request, self.mode
        engine, sampling = TOKEN_ENGINES[self.context.engine], self._sampling
        stops = frozenset() if sampling.get("ignore_eos") else mode.renderer.stop_token_ids
        self._name = f"{self._call_id}-{secrets.token_hex(4)}"  # a server refuses a name that it is still sampling
        reply = self._new_reply()
        reply.read_event = engine.reader()
        reply.path, reply.body = engine.request(
            TokenRequest(
                prompt=b"[]" if self._prompt is None else self._prompt.json,
                asked=request.asked,
                sampling=sampling,
                name=self._name,
                max_tokens=self._max_tokens,
                stop_token_ids=sorted(stops.union(sampling.get("stop_token_ids") or ())),
                stream=request.stream,
            )
        )
        return reply

    def _new_reply(self) -> TokenReply:
        request, renderer = self.request, self.mode.renderer
        reply = TokenReply(renderer, request.asked, self._prompt, request.reply_id, self._form, self._untrainable)
        self._reply = reply
        return reply

    def whole(self, record: CallRecord) -> bytes:
        assert self._reply is not None
        request, choices, usage = self.request, self._reply.choices, self._reply.usage
        reply = Reply(
            id=request.reply_id,
            model=request.asked.model,
            created=int(record.started_s),
            choices=choices,
            usage=usage,
        )
        return DIALECTS[request.dialect].encode_reply(reply, request.asked)

    def cancel(self, worker: Worker) -> None:
        if (cancel := TOKEN_ENGINES[self.context.engine].cancel) is not None:
            self.mode.cancel(worker, *cancel(self._name))


async def _completed(work: asyncio.Future[None]) -> None:
    """Wait for a thread, also if the call is cancelled: the thread uses the conversation until then."""
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise

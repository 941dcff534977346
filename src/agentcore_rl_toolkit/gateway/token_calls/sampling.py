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
from functools import partial
from typing import Any

import msgspec

from ...messages.dialects import Delta, RequestError, chat, context_overflow, passthrough
from ...messages.dialects.canonical import Usage
from ...messages.dialects.passthrough import Fields
from ...messages.render import Conversation, RenderedPrompt
from ..calls.agent import TranslatingAgent
from ..calls.call import Call
from ..calls.context import Context
from ..calls.engine import Incoming
from ..calls.running import RunningCall
from ..calls.states import State
from ..capture.record import CONSTRAINED, Captured
from ..engines import TOKEN_ENGINES, GenerationStream, Piece, constraints
from ..http.connection import AgentConnection
from ..sessions.session import Session
from ..upstreams.router import Worker
from .histories import History
from .mode import TokenMode
from .reply import TokenReply

log = logging.getLogger(__name__)

_to_json = msgspec.json.Encoder().encode


class TokenSampling:
    """An `EngineSide`, over token engines. ``live``: a reply is read as it comes, because the agent streams. ``whole`` is the
    whole reply of an engine that does not answer in bytes.
    """

    def __init__(self, context: Context, session: Session, agent: TranslatingAgent, mode: TokenMode) -> None:
        self._context = context
        self._session = session
        self._agent = agent
        self._mode = mode
        self.incoming = Incoming(context.running)
        self._engine = TOKEN_ENGINES[context.engine]
        self._history: History | None = None  # the session's, pinned until the call is over
        self._prompt: RenderedPrompt | None = None
        self._prompt_json = b"[]"
        self._answers: list[tuple[str, list[int], dict[str, Any]]] = []
        self._call_id = ""
        self._path = b""
        self._body = b""
        self._name: str | None = None  # of the request that the engine has
        self._live = False
        self._reader: GenerationStream | None = None
        self._reply: TokenReply | None = None
        self.whole: list[Piece] | None = None

    # -- the request

    def understand(self, body: bytes) -> Fields:
        agent, session = self._agent, self._session
        allowed = self._context.allow_fields
        recorded = partial(session.replies.find, self._context.sessions.store, session.number)
        agent.understand(body, session.texts.translated, list, allowed, recorded)
        asked = agent.asked
        self._live = agent.stream and self._engine.streams
        fields = agent.as_chat(list)
        if session.overrides:
            passthrough.overlay(fields, session.overrides)
            chat.overlay(asked, fields)
        agent.n = asked.n
        self._mode.require(asked)
        return fields

    def compose(self, fields: Fields) -> None:
        """The engine's request needs the prompt, which a thread is about to make."""
        if self._session.settings.model_id is not None:
            self._agent.asked.model = self._session.settings.model_id

    def prepare(self, owner: RunningCall, call_id: str) -> None:
        self._call_id = call_id
        self._history = self._mode.histories.pin(self._session)
        owner.become(State.RENDERING)
        self._mode.tasks.start(self._render(owner, self._history))

    async def _render(self, owner: RunningCall, history: History) -> None:
        """Make the prompt when the session's calls before it are through, and go."""
        try:
            async with history.order:
                if not owner.ended:
                    conversation = await self._mode.histories.open(history)
                    await asyncio.get_running_loop().run_in_executor(
                        self._mode.executor, self._make_prompt, conversation
                    )
            if not owner.ended:
                self._write()
                owner.go()
        except RequestError as e:
            owner.fail(e)
        except asyncio.CancelledError:
            raise
        except BaseException as e:  # a panic in the tokenizer's Rust code is no `Exception`
            owner.broke(e)

    def _make_prompt(self, conversation: Conversation) -> None:
        asked = self._agent.asked
        prompt = self._prompt = self._mode.renderer.render(
            conversation, asked.messages, asked.tools or None, asked.template_options() or None
        )
        asked.counted = Usage(prompt_tokens=prompt.length, cached_tokens=prompt.reused_tokens)
        self._prompt_json = prompt.json

    def _write(self) -> None:
        """Write the request in the engine's words. Raises: RequestError when the prompt leaves no room for an answer."""
        self._path, self._body = self._engine.request(
            self._prompt_json,
            self._agent.asked,
            max_tokens=self._max_tokens(),
            stop_token_ids=sorted(self._mode.renderer.stop_token_ids),
            stream=self._live,
        )

    def _max_tokens(self) -> int:
        asked, settings = self._agent.asked.sampling.max_tokens, self._session.settings
        bound = min(asked or self._mode.max_tokens, settings.max_tokens or asked or self._mode.max_tokens)
        window, counted = self._mode.context_tokens, self._agent.asked.counted
        size = counted.prompt_tokens if counted is not None else None
        if window is None or size is None:
            return bound
        room = window - size
        if room < 1 or (asked is not None and bound > room):
            raise context_overflow(size, window, max_tokens=bound if asked is not None else None)
        return min(bound, room)

    def request_for(self, worker: Worker) -> tuple[bytes, tuple[bytes, ...]]:
        self._name = f"{self._call_id}-{secrets.token_hex(4)}"
        return self._path, (self._engine.named(self._body, self._name),)

    def stop(self, worker: Worker) -> None:
        name, self._name = self._name, None
        ending = None if name is None else self._engine.cancel(name)
        if ending is not None:
            self._mode.cancel(worker, *ending)

    # -- the reply

    def forget(self) -> None:
        self._reply = self._reader = None

    def feed(self, data: bytes) -> list[Delta]:
        if not self._live:
            return []
        if self._reader is None:
            self._reader = self._engine.stream()
        return [delta for piece in self._reader.feed(data) for delta in self._take(piece)]

    def _take(self, piece: Piece) -> list[Delta]:
        if piece.weights is not None and (worker := self._context.router.workers.get(self.incoming.upstream_id or "")):
            worker.says(piece.weights)
        if self._live and piece.ids:
            self.incoming.span.sampled()
        return self._sampled().take(piece)

    def _sampled(self) -> TokenReply:
        if self._reply is None:
            self._reply = TokenReply(self._mode.renderer, self._agent.asked, self._prompt)
        return self._reply

    def capture(self) -> Captured:
        sampled, agent = self._sampled(), self._agent
        if not self._live:
            pieces = self._engine.reply(self.incoming.body()) if self.whole is None else self.whole
            for piece in pieces:
                self._take(piece)
        captured = Captured(choices=[], has_tokens=True, reply_id=agent.reply_id, model=agent.asked.model)
        captured.prompt = self._prompt_json[1:-1]
        if self._reader is not None and self._reader.error is not None:
            captured.error = _to_json(self._reader.error)
        if not self._context.train_constrained and constraints.holds(agent.asked):
            captured.untrainable = CONSTRAINED
        sampled.record(captured)
        if captured.complete and captured.error is None:
            self._answers = sampled.answers(self._call_id)
        if self._answers and self._prompt is not None:
            captured.parent_turn, captured.branch_reason = self._prompt.parent_turn, self._prompt.branch_reason
        return captured

    def release(self) -> None:
        history, self._history = self._history, None
        if history is not None:
            self._mode.tasks.start(self._settle(history))

    async def _settle(self, history: History) -> None:
        """Add the answers to the history; without one the session stands where it stood before."""
        try:
            async with history.order:  # a thread may have the conversation
                prompt, conversation, renderer = self._prompt, history.conversation, self._mode.renderer
                if prompt is None or conversation is None:
                    return
                for place, (turn_id, ids, message) in enumerate(self._answers, 1):
                    more = place < len(self._answers)
                    renderer.commit(conversation, prompt, array("I", ids), message, turn_id=turn_id, more=more)
                if not self._answers:
                    renderer.abandon(conversation, prompt)
        except Exception:
            log.exception("call %s is not in the history of session %s", self._call_id, self._session.id)
        finally:
            self._mode.histories.unpin(history)


def token_call(context: Context, conn: AgentConnection, session: Session, dialect: str, mode: TokenMode) -> Call:
    """A call over a token engine, in any dialect."""
    agent = TranslatingAgent(conn, dialect)
    return Call(context, session, agent, TokenSampling(context, session, agent, mode))

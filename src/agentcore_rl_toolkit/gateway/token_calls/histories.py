"""The sessions' histories as tokens, up to a limit of memory; the others are in the store.

In token mode the next prompt of a session extends the last one, so its tokens are kept: some 15 bytes per
token of context, with the text that is sent and the messages that are compared. Histories of sessions with a running call stay
in memory; of the others, the most recent ones up to a budget. A dropped history is built again from its records
(`render.past_calls`) when its session calls again, as after a restart. That costs a few milliseconds of a rendering thread per
100,000 tokens.

A conversation is used by one call at a time: a rendering thread or the event loop has it while the call holds `History.order`.
That is a lock between tasks of the event loop, so the loop never waits for a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import CaptureError, GatewayError
from ...messages.render import Conversation, PastCall, Renderer, replay
from ...messages.wire import ModelRequest
from ..capture.record import INVALID, OK, CallRecord, decode_small, ids_array
from ..capture.turns import message_lists, places_of, turn_id, whole_prompt
from ..sessions import Session, Sessions

log = logging.getLogger(__name__)

_json = msgspec.json.Decoder()
# What reading records from a damaged disk may raise.
_DAMAGE = (CaptureError, GatewayError, msgspec.DecodeError, KeyError, TypeError, AttributeError, IndexError)


class _Options(msgspec.Struct):
    """The fields of a recorded request that its history depends on."""

    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None


_options = msgspec.json.Decoder(_Options)


@dataclass(slots=True, eq=False)
class History:
    """A session's place among the histories. ``pins`` counts the calls that need it, ``conversation`` None: on disk.

    A call holds ``order`` while it uses the conversation. Calls get it in the order in which they ask for it.
    """

    session: Session
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    conversation: Conversation | None = None
    pins: int = 0
    size: int = 0


class Histories:
    """The sessions' histories in memory. Units: bytes, as `Conversation.size_bytes` measures them."""

    def __init__(self, sessions: Sessions, renderer: Renderer, threads: Executor, *, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self.reloads = 0
        self._sessions = sessions
        self._renderer = renderer
        self._threads = threads
        self._of: OrderedDict[Session, History] = OrderedDict()  # those in memory, longest quiet first
        sessions.closing = self.forget

    def pin(self, session: Session) -> History:
        """Keep a session's history for a call that begins."""
        history = self._of.setdefault(session, History(session))
        self._of.move_to_end(session)
        history.pins += 1
        return history

    def unpin(self, history: History) -> None:
        """End the use of a history by a call. Update its size, and drop the oldest histories above the budget."""
        history.pins -= 1
        if self._of.get(history.session) is not history:
            return  # the session is closed
        if history.conversation is not None:
            size = history.conversation.size_bytes
            self.held_bytes += size - history.size
            history.size = size
        elif not history.pins:
            self.forget(history.session)
        while self.held_bytes > self.budget_bytes:
            oldest = next((each for each in self._of.values() if not each.pins), None)
            if oldest is None:
                break
            self.forget(oldest.session)

    async def open(self, history: History) -> Conversation:
        """Make the history of a pinned session from its records. The caller holds ``history.order``."""
        session, store, loop = history.session, self._sessions.store, asyncio.get_running_loop()

        def replayed() -> Conversation:
            records = [decode_small(payload) for payload in store.for_threads.calls(session.number)]
            return replay(self._renderer, past_calls(records), now=session.created_s)

        if session.records:
            self.reloads += 1
            store.commit()  # only committed calls can be read
            try:
                history.conversation = await loop.run_in_executor(self._threads, replayed)
            except _DAMAGE as e:
                # The call is worth more than its prefix. The branch that now begins is counted in the session's report.
                log.warning("the history of session %s cannot be made from its records: %r", session.id, e)
        if history.conversation is None:
            history.conversation = self._renderer.conversation(now=session.created_s)
        return history.conversation

    def forget(self, session: Session) -> None:
        """Drop the history of a quiet or closed session."""
        history = self._of.pop(session, None)
        if history is not None:
            self.held_bytes -= history.size


def past_calls(records: Sequence[CallRecord]) -> Iterator[PastCall]:
    """Return the answered chat calls of one session, in stored order."""
    messages = message_lists(records)
    known: dict[int, tuple[Any, Mapping[str, Any] | None]] = {}
    places = places_of(records)
    for place, record in enumerate(records):
        if (
            record.status not in (OK, INVALID)
            or not (record.prompt_base.length or record.prompt_ids)
            or not record.choices
            or not all(choice.ids for choice in record.choices)
        ):
            continue
        at = place if record.request_of is None else places[record.request_of]
        if at not in known:
            known[at] = _stands_on(records[at].request)
        tools, options = known[at]
        yield PastCall(
            messages=messages[place],
            tools=tools,
            options=options,
            prompt=ids_array(whole_prompt(records, place, places)),
            extended=record.parent_turn is not None,
            answers=[
                (turn_id(record, choice.index), ids_array(choice.ids), _json.decode(choice.message))
                for choice in record.choices
            ],
        )


def _stands_on(request: bytes) -> tuple[list[dict[str, Any]] | None, dict[str, Any] | None]:
    found = _options.decode(request)
    asked = ModelRequest(
        dialect="chat",
        model="",
        template_kwargs=found.chat_template_kwargs,
        reasoning_effort=found.reasoning_effort,
    )
    return found.tools or None, asked.template_options() or None

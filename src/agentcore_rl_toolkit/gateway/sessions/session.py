"""One session: its key and settings, its calls under way, what of it is stored, and its last replies, for requests that are
sent again (`gateway.retries`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from ...contract import TURNS_USED
from ...messages.errors import RequestError
from ...messages.wire import passthrough
from ...messages.wire.passthrough import Fields
from ..capture.build import Texts
from ..capture.replies import RecordedReplies
from ..routing.router import Worker
from .settings import SessionSettings

_LENGTHS = ("max_tokens", "max_completion_tokens")
_to_json = msgspec.json.Encoder().encode

REMEMBERED = 64  # answered calls per session that a repeated request may be joined to


class Stored:
    """A session as the store has it: its ``number``, how many calls (``records``). ``undelivered`` are calls whose replies no
    agent took whole, as far as this process has met them.
    """

    __slots__ = ("number", "records", "undelivered")

    def __init__(self, number: int) -> None:
        self.number = number
        self.records = 0
        self.undelivered: set[int] = set()


class Session:
    """One session. ``records`` counts its stored calls, ``turns`` those that are turns."""

    def __init__(
        self, session_id: str, key: bytes, settings: SessionSettings, created_s: float, stored: Stored
    ) -> None:
        self.stored = stored
        self.id = session_id
        self.key = key
        self.use(settings)
        self.created_s = created_s
        self.closed = False
        self.closed_s: float | None = None
        self.last_call_s: float | None = None  # when its last call was recorded (unix), as far as this process knows
        self.next_index = 0
        self.started_turns = 0  # calls that count against max_turns: running ones and turns
        self.turns = 0
        self.errors = 0
        self.refused = 0  # requests that are entries of it and no calls
        self.inflight: set[Any] = set()  # its running calls (`Call`)
        self.worker: Worker | None = None
        self.texts = Texts()
        self.replies = RecordedReplies()
        self.recent: OrderedDict[int, Repeats] | None = OrderedDict()  # by digest of the request
        self.recalled = False  # whether `recent` has the replies of an earlier process

    @property
    def id_bytes(self) -> bytes:
        return self.id.encode()

    def use(self, settings: SessionSettings) -> None:
        self.settings = settings
        self.overrides = settings.overrides()

    def hold_to_settings(self, fields: Fields) -> None:
        """Change a request to what the session allows: the trainer's sampling parameters win, and its limits hold.

        Raises: RequestError where that cannot be done.
        """
        settings = self.settings
        if settings.max_turns is not None and self.started_turns >= settings.max_turns:
            raise RequestError(f"this session may make {settings.max_turns} {TURNS_USED}", kind="turn_limit")
        if settings.model_id is not None:
            fields["model"] = msgspec.Raw(_to_json(settings.model_id))
        passthrough.overlay(fields, self.overrides)
        if settings.max_tokens is not None:
            for key in [key for key in _LENGTHS if key in fields] or _LENGTHS[:1]:
                asked = passthrough.number(fields.get(key, msgspec.Raw(b"null")))
                if asked is None or asked > settings.max_tokens:
                    fields[key] = msgspec.Raw(b"%d" % settings.max_tokens)

    def repeats_of(self, digest: int) -> Repeats:
        """The replies to a request; only the last few requests of a session are kept."""
        if self.recent is None:
            return Repeats()
        known = self.recent.get(digest)
        if known is None:
            known = self.recent[digest] = Repeats()
            if len(self.recent) > REMEMBERED:
                self.recent.popitem(last=False)
        else:
            self.recent.move_to_end(digest)
        return known

    def append(self) -> None:
        """A call of the session is to be stored."""
        self.stored.records += 1
        self.last_call_s = time.time()

    def forget_texts(self) -> None:
        """Let nothing later refer to what was recorded so far."""
        self.texts = Texts()

    @property
    def records(self) -> int:
        return self.stored.records

    @property
    def number(self) -> int:
        return self.stored.number


Deliver = Callable[[Session, int, bool], None]  # `Sessions.deliver`


class RecordedReply:
    """A recorded reply. ``received``: an agent has all of it. ``connections`` counts those that it is being sent on."""

    __slots__ = ("_deliver", "connections", "position", "received", "session")

    def __init__(
        self, deliver: Deliver, session: Session, position: int, *, received: bool = False, connections: int = 0
    ) -> None:
        self._deliver = deliver
        self.session = session
        self.position = position
        self.received = received
        self.connections = connections
        if not received and not connections:
            deliver(session, position, False)

    def sent(self, *, whole: bool) -> None:
        """A connection has ended. ``whole``: it has sent the reply to its end."""
        self.connections -= 1
        if whole and not self.received:
            self.received = True
            self._deliver(self.session, self.position, True)
        elif not self.received and not self.connections:
            self._deliver(self.session, self.position, False)


class Repeats:
    """The replies to one request of a session, oldest first, and how many calls failed before their reply began."""

    __slots__ = ("failed", "replies")

    def __init__(self) -> None:
        self.failed = 0
        self.replies: list[RecordedReply] = []

    def add(self, reply: RecordedReply) -> None:
        self.replies.append(reply)
        del self.replies[:-REMEMBERED]

"""One session: its key and settings, its calls under way, what of it is stored, and its last replies, for requests that are
sent again (`calls.dedup`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...contract import TURNS_USED
from ...messages.dialects import passthrough
from ...messages.dialects.passthrough import Fields
from ...messages.errors import RequestError
from ..capture.build import Texts
from ..capture.replies import RecordedReplies
from ..upstreams.router import Worker
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
        self.id_bytes = session_id.encode()
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
        self.inflight: set[Any] = set()  # its running calls (`calls.running.RunningCall`)
        self.worker: Worker | None = None
        self.texts = Texts()
        self.replies = RecordedReplies()
        self.recent: OrderedDict[int, Repeated] | None = OrderedDict()

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

    def append(self) -> None:
        """A call of the session is to be stored."""
        self.stored.records += 1
        self.last_call_s = time.time()

    def forget_texts(self) -> None:
        """Let nothing later refer to what was recorded so far."""
        self.texts.clear()

    @property
    def records(self) -> int:
        return self.stored.records

    @property
    def number(self) -> int:
        return self.stored.number


Took = Callable[[Session, int, bool], None]  # `Sessions.took`


class RecordedReply:
    """The recorded reply of a call. ``taken_by`` counts the connections that carry it, or carried it to the end."""

    __slots__ = ("call_id", "digest", "finished", "position", "session", "taken_by", "took")

    def __init__(self, took: Took, session: Session, position: int, call_id: str, digest: int) -> None:
        self.took = took
        self.session = session
        self.position = position
        self.call_id = call_id
        self.digest = digest
        self.taken_by = 0
        self.finished = time.monotonic()

    def old(self, limit_s: float) -> bool:
        return time.monotonic() - self.finished > limit_s

    def carried(self) -> None:
        """A connection carries it from now on."""
        self.taken_by += 1

    def not_taken(self, *, sure: bool) -> None:
        """A connection that carried it ended too early. ``sure``: its agent cannot have got it whole."""
        self.taken_by -= 1
        if not self.taken_by:
            self.lost(sure=sure)

    def lost(self, *, sure: bool) -> None:
        """No agent took it."""
        session = self.session
        if session.recent is not None:
            lost = repeats_of(session.recent, self.digest).lost
            if self not in lost:
                lost.append(self)
                del lost[:-REMEMBERED]
        if sure:
            self.took(session, self.position, False)


@dataclass(slots=True)
class Repeated:
    """The calls of one body that may be asked for again: the last one that was answered, those that no agent took
    whole, oldest first, and how many failed before their reply began and were not asked for again.
    """

    last: RecordedReply | None = None
    lost: list[RecordedReply] = field(default_factory=list)
    failed: int = 0


def repeats_of(recent: OrderedDict[int, Repeated], digest: int) -> Repeated:
    """The known calls with this body; only the last few bodies of a session are kept."""
    known = recent.get(digest)
    if known is None:
        known = recent[digest] = Repeated()
        if len(recent) > REMEMBERED:
            recent.popitem(last=False)
    else:
        recent.move_to_end(digest)
    return known

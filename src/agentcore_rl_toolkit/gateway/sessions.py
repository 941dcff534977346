"""The sessions of a gateway: keys, settings, running calls, rows in the store, and last replies for repeated requests.

The trainer creates a session with the admin key. A call creates one only with ``session_keys`` off. The session's key is derived
from the store's secret and its id, so that keys survive a restart without being stored.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..contract import TURNS_USED, check_train
from ..errors import ConfigError, ContractError
from ..messages.errors import RequestError
from ..messages.wire import ModelRequest, passthrough
from ..messages.wire.chat import parse_parameters
from ..messages.wire.passthrough import Fields
from .capture.build import Texts
from .router import Worker
from .store.replies import RecordedReplies
from .store.writer import Store

REMEMBERED = 64  # answered calls per session that requests may repeat
_TOMBSTONES = 100_000
_LENGTHS = ("max_tokens", "max_completion_tokens")
# The characters that a client writes into the path of a URL as they are (RFC 3986, pchar).
# Parts may be divided by "/" (as Harbor's are). A part is not "..", and not the beginning of a session's routes.
_ID = re.compile(
    r"(?=.{1,200}\Z)(?!(?:.*/)?(?:\.\.?|v1|traces)(?:/|\Z))[A-Za-z0-9._~!$&'()*+,;=:@-]+(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]+)*"
)
# Members of a request that are no sampling parameters: the conversation, the form of the reply, and fields of the record.
_NOT_SAMPLING = {"messages", "prompt", "input", "system", "stream", "stream_options", "model", "request_id"}
_NOT_SAMPLING |= {"return_token_ids", "return_tokens_as_token_ids", "echo"}
_NOT_SAMPLING |= {"best_of", "use_beam_search", "logits_processors"}
_to_json = msgspec.json.Encoder().encode


class SessionSettings(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True, dict=True):
    """The settings that a session's calls must keep. They are checked when it is opened: a later error would fail the agent.

    ``sampling_params`` replace the agent's. ``max_tokens`` is an upper bound of the agent's. ``train`` is the trainer's
    rule of which conversations train (`trajectory.selection`); None leaves it to agent and client.
    """

    sampling_params: dict[str, Any] = {}
    model_id: Annotated[str, Meta(min_length=1)] | None = None
    max_turns: Annotated[int, Meta(ge=0)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    train: str | None = None
    metadata: dict[str, Any] = {}

    @cached_property
    def overrides(self) -> Fields:
        """Return the sampling parameters without nulls. A whole number has no fraction, as engines want `n`."""
        given = {name: value for name, value in self.sampling_params.items() if value is not None}
        return given | {name: int(v) for name, v in given.items() if isinstance(v, float) and v.is_integer()}

    def check(self) -> ModelRequest:
        """Check the settings. Returns the sampling parameters as a request of chat completions has them.

        Raises: RequestError that names the field.
        """
        if self.train is not None:
            try:
                check_train(self.train)
            except ConfigError as e:
                raise RequestError(str(e), param="train") from e
        try:
            return self._parsed()
        except RequestError as e:
            raise RequestError(f"in sampling_params: {e}", kind=e.kind, param=f"sampling_params.{e.param}") from e

    def _parsed(self) -> ModelRequest:
        params = self.sampling_params
        for name in params.keys() & _NOT_SAMPLING:
            raise RequestError(f"{name} is not a sampling parameter (`model_id` sets the model)", param=name)
        for names in (["max_tokens", "max_completion_tokens"], ["tool_choice", *passthrough.forms(self.overrides)]):
            given = [name for name in names if params.get(name) not in (None, "auto", "none")]
            if len(given) > 1:
                raise RequestError(
                    f"{given[1]} and {given[0]} set the same parameter: give one of them", param=given[1]
                )
        return parse_parameters(params)


@dataclass(eq=False, repr=False)
class Session:
    """A session. ``number`` is its row in the store. ``records`` counts its stored calls, ``turns`` those that are turns.

    ``started_turns`` counts the calls against max_turns: running ones and turns.
    """

    store: Store
    number: int
    id: str
    key: bytes
    settings: SessionSettings
    created_s: float
    closed_s: float | None = None
    last_call_s: float | None = None  # when its last call was recorded (unix), as far as this process knows
    next_index: int = 0
    started_turns: int = 0
    records: int = 0
    turns: int = 0
    errors: int = 0
    refused: int = 0  # refused requests that it records
    inflight: set[Any] = field(default_factory=set)  # its running calls (`Call`)
    worker: Worker | None = None
    history: Any = None  # its tokens in token mode (`History`)
    texts: Texts = field(default_factory=Texts)
    replies: RecordedReplies = field(default_factory=RecordedReplies)
    # The last calls, oldest first. None: those of an earlier process are in the store.
    recent: deque[RecordedReply] | None = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    @property
    def closed(self) -> bool:
        return self.closed_s is not None

    def save(self) -> None:
        """Store the session as it is now."""
        settings = _to_json(self.settings).decode()
        self.store.put_session(self.number, self.id, self.created_s, self.closed_s, settings)

    def hold_to_settings(self, fields: Fields) -> None:
        """Change a request to what the session allows: the trainer's sampling parameters win, and its limits hold.

        Raises: RequestError where that cannot be done.
        """
        settings = self.settings
        if settings.max_turns is not None and self.started_turns >= settings.max_turns:
            raise RequestError(f"this session may make {settings.max_turns} {TURNS_USED}", kind="turn_limit")
        if settings.model_id is not None:
            fields["model"] = settings.model_id
        if settings.overrides:
            passthrough.overlay(fields, settings.overrides)
        seed: Any = fields.get("seed")  # one seed would make all rollouts of a group the same sample
        if type(seed) in (int, float) and seed >= 0 and seed % 1 == 0 and "seed" not in settings.overrides:
            fields["seed"] = (int(seed) + zlib.crc32(self.id.encode())) % 2**31
        if settings.max_tokens is not None:
            for key in [key for key in _LENGTHS if key in fields] or _LENGTHS[:1]:
                asked = fields.get(key)
                if type(asked) is not int or not 0 <= asked <= settings.max_tokens:
                    fields[key] = settings.max_tokens

    def refuse(self) -> None:
        """Handle a record that the disk refused. Delete the texts: later records must not refer to it."""
        self.texts = Texts()
        self.records -= 1

    def keep(self, reply: RecordedReply) -> None:
        """Keep a reply, for requests that repeat its call."""
        if self.recent is None:
            self.recent = deque(maxlen=REMEMBERED)
        self.recent.append(reply)
        reply.deliver()


@dataclass(slots=True, eq=False, repr=False)
class RecordedReply:
    """The reply of a call to the request with this ``digest``.

    ``position`` is the call's number in the store. None: it is running, or failed before its reply began. ``received``: an agent
    has all of it. ``delivered`` is what the store has for this. ``connections`` counts those that it is being sent on.
    """

    session: Session
    digest: int
    position: int | None = None
    received: bool = False
    delivered: bool = True
    connections: int = 0

    def sent(self, *, whole: bool) -> None:
        """Remove a connection. ``whole``: the complete reply was written on it."""
        self.connections -= 1
        self.received = self.received or whole
        self.deliver()

    def deliver(self) -> None:
        """Store if an agent has the complete reply, unless it is being sent. A call without a delivered reply uses no turn."""
        if self.position is None or self.delivered == self.received or (self.connections and not self.received):
            return
        self.delivered = self.received
        self.session.started_turns += 1 if self.delivered else -1
        self.session.store.deliver(self.position, whole=self.delivered)


class Sessions:
    """All sessions of one gateway."""

    def __init__(self, store: Store, *, model_id: str | None = None) -> None:
        self.store = store
        self.by_id: dict[bytes, Session] = {}
        self.model_id = model_id  # the default of sessions
        self.turns = 0
        self.deleted: OrderedDict[bytes, None] = OrderedDict()  # the last ones
        self._secret: bytes = store.reader.value("secret") or secrets.token_bytes(32)
        store.set("secret", self._secret)
        store.commit()

    def _key_of(self, session_id: str) -> bytes:
        return b"sk-" + hmac.new(self._secret, session_id.encode(), hashlib.sha256).hexdigest()[:48].encode()

    def create(self, session_id: str, settings: SessionSettings) -> Session:
        """Open a session. Opening it again with the same id gives the same one, with the new settings.

        Raises: ContractError on an unusable id, or a closed session.
        """
        self._check([session_id])
        name, store = session_id.encode(), self.store
        if settings.model_id is None and self.model_id is not None:
            settings = msgspec.structs.replace(settings, model_id=self.model_id)
        session = self.by_id.get(name)
        if session is None:
            key = self._key_of(session_id)
            session = self.by_id[name] = Session(store, store.next_session, session_id, key, settings, time.time())
            store.next_session += 1
            self.deleted.pop(name, None)
        else:
            session.settings = settings
        session.save()
        return session

    def _check(self, session_ids: Iterable[str]) -> None:
        """Raise ContractError if one of these sessions cannot be opened."""
        for session_id in session_ids:
            if not _ID.fullmatch(session_id):
                raise ContractError(
                    f"session id {session_id[:250]!r} must be 1 to 200 letters, digits or characters of .-_~!$&'()*+,;=:@, "
                    "in parts divided by /; a part must not be empty, '.', '..', 'v1' or 'traces'"
                )
            known = self.by_id.get(session_id.encode())
            if known is not None and known.closed:
                raise ContractError(
                    f"session {session_id} is closed; delete it before opening it again", session_id=session_id
                )

    async def open(self, session_ids: Sequence[str], settings: SessionSettings) -> list[Session]:
        """Open all of these sessions or none, and wait until they are stored.

        Raises: ContractError as `create`; RequestError when the disk refuses.
        """
        self._check(session_ids)
        sessions = {name: self.create(name, settings) for name in dict.fromkeys(session_ids)}
        error = await self.store.kept()
        if error is not None:
            raise RequestError(f"the gateway cannot store a session ({error}); try again", kind="overloaded")
        return [sessions[name] for name in session_ids]

    def close(self, session: Session) -> None:
        """Refuse further calls, and end the running ones."""
        if session.closed:
            return
        session.closed_s = time.time()
        for call in list(session.inflight):
            call.abort(RequestError(f"session {session.id} was closed", kind="permission"))
        session.save()
        session.texts, session.replies = Texts(), RecordedReplies()
        session.recent = session.worker = session.history = None

    def delete(self, names: Iterable[bytes]) -> int:
        """Delete sessions and their calls, for good. Returns how many there were."""
        count = 0
        for name in names:
            session = self.by_id.get(name)
            if session is None:
                continue
            self.close(session)
            del self.by_id[name]
            self.store.delete_session(session.number)
            self.deleted[name] = None
            if len(self.deleted) > _TOMBSTONES:
                self.deleted.popitem(last=False)
            count += 1
        return count

    def restore(self) -> int:
        """Take up the stored sessions. Returns how many calls they have. Raises: GatewayError on a damaged store."""
        counts = self.store.reader.counts()
        for row in self.store.reader.sessions():
            settings = msgspec.json.decode(row.settings, type=SessionSettings)
            key = self._key_of(row.session_id)
            session = Session(self.store, row.number, row.session_id, key, settings, row.created_s)
            session.closed_s, session.recent = row.closed_s, None
            if (found := counts.get(row.number)) is not None:
                session.records, session.turns = found.calls, found.turns
                session.errors = found.calls - found.turns
                session.started_turns = found.turns - found.undelivered
                session.next_index = found.last_index + 1
                self.turns += found.turns
            self.by_id[session.id.encode()] = session
        return sum(found.calls for found in counts.values())

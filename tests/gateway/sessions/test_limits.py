"""What a session makes of its settings, its calls and their replies, without a gateway around it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import ContractError
from agentcore_rl_toolkit.gateway.capture.record import OK, CallRecord
from agentcore_rl_toolkit.gateway.sessions import RecordedReply, Session, Sessions, SessionSettings
from agentcore_rl_toolkit.gateway.store.writer import Store
from agentcore_rl_toolkit.messages.errors import RequestError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.close()


def opened(store: Store, **settings: Any) -> Session:
    return Sessions(store).create("s", SessionSettings(**settings))


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({}, {"max_tokens": 7}),
        ({"max_tokens": 0}, {"max_tokens": 0}),
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"max_tokens": 8}, {"max_tokens": 7}),
        ({"max_tokens": -1}, {"max_tokens": 7}),
        ({"max_tokens": True}, {"max_tokens": 7}),
        ({"max_tokens": "9"}, {"max_tokens": 7}),
        ({"max_completion_tokens": 3}, {"max_completion_tokens": 3}),
        ({"max_tokens": 3, "max_completion_tokens": 9}, {"max_tokens": 3, "max_completion_tokens": 7}),
    ],
)
def test_the_length_of_an_answer_is_bounded(store: Store, asked: dict[str, Any], kept: dict[str, Any]) -> None:
    opened(store, max_tokens=7).hold_to_settings(asked)
    assert asked == kept


@pytest.mark.parametrize(
    ("seed", "changes"), [(0, True), (1, True), (2.0, True), (1.5, False), (-1, False), (True, False)]
)
def test_a_seed_that_is_a_whole_number_is_the_sessions(store: Store, seed: Any, changes: bool) -> None:
    fields: dict[str, Any] = {"seed": seed}
    opened(store).hold_to_settings(fields)
    assert fields["seed"] == ((int(seed) + zlib.crc32(b"s")) % 2**31 if changes else seed)
    fields = {"seed": seed}
    opened(store, sampling_params={"seed": 5}).hold_to_settings(fields)
    assert fields["seed"] == 5


def test_the_calls_of_a_session_are_bounded_and_use_its_model(store: Store) -> None:
    session = opened(store, max_turns=2, model_id="m")
    for session.started_turns in (0, 1):
        session.hold_to_settings(fields := {"model": "agents"})
        assert fields == {"model": "m"}
    session.started_turns = 2
    with pytest.raises(RequestError, match="may make 2"):
        session.hold_to_settings({})
    session.settings = SessionSettings()
    session.hold_to_settings(fields := {"model": "agents"})
    assert fields == {"model": "agents"}


def test_overrides_have_no_nulls_and_whole_numbers_have_no_fraction() -> None:
    given = {"n": 2.0, "temperature": 0.5, "seed": None, "stop": ["a"], "top_k": 3}
    overrides = SessionSettings(sampling_params=given).overrides
    assert repr(overrides) == repr({"n": 2, "temperature": 0.5, "stop": ["a"], "top_k": 3})


def test_a_reply_uses_a_turn_unless_no_agent_has_it_whole(store: Store) -> None:
    session = opened(store)
    session.started_turns = 1
    reply = RecordedReply(session, digest=5, connections=2)
    reply.sent(whole=False)  # it is not stored yet
    assert (reply.connections, reply.delivered, session.started_turns) == (1, True, 1)
    reply.position = 1
    session.keep(reply)
    assert session.started_turns == 1  # it is being sent
    reply.sent(whole=False)
    assert (reply.connections, reply.delivered, session.started_turns) == (0, False, 0)
    reply.connections = 2
    reply.sent(whole=True)  # received, though another connection still gets it
    assert (reply.received, reply.delivered, session.started_turns) == (True, True, 1)
    reply.sent(whole=False)
    assert (reply.received, reply.delivered, session.started_turns) == (True, True, 1)


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_session_keeps_its_last_64_replies(store: Store, forgotten: bool) -> None:
    session = opened(store)
    if forgotten:
        session.recent = None
    for digest in range(65):
        session.keep(RecordedReply(session, digest))
    assert session.recent is not None
    assert [reply.digest for reply in session.recent] == list(range(1, 65))


def test_a_refused_record_does_not_count(store: Store) -> None:
    session = opened(store)
    session.records, texts = 2, session.texts
    session.refuse()
    assert (session.records, session.texts is texts) == (1, False)


def test_deleted_sessions_are_counted_and_the_last_ones_are_known(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentcore_rl_toolkit.gateway.sessions._TOMBSTONES", 2)
    sessions = Sessions(store)
    names = [b"a", b"b", b"c"]
    for name in names:
        sessions.create(name.decode(), SessionSettings())
    assert sessions.delete([*names[:2], b"unknown"]) == 2
    assert list(sessions.deleted) == names[:2]
    assert sessions.delete(names) == 1
    assert list(sessions.deleted) == names[1:]
    sessions.create("b", SessionSettings())
    assert list(sessions.deleted) == names[2:]


def test_a_session_that_is_opened_again_has_the_new_settings_and_a_closed_one_is_refused(store: Store) -> None:
    sessions = Sessions(store, model_id="default")
    first = sessions.create("s", SessionSettings(max_turns=1))
    assert (first.number, first.settings.model_id, len(first.key)) == (store.next_session - 1, "default", 51)
    assert (first.next_index, first.started_turns, first.turns, first.errors, first.refused) == (0, 0, 0, 0, 0)
    assert sessions.create("s", SessionSettings(max_turns=2, model_id="m")) is first
    assert (first.settings.max_turns, first.settings.model_id) == (2, "m")
    assert sessions.create("t", SessionSettings()).number == first.number + 1
    sessions.close(first)
    closed_s = first.closed_s
    sessions.close(first)
    assert first.closed_s == closed_s
    with pytest.raises(ContractError, match="is closed"):
        sessions.create("s", SessionSettings())


def test_restored_sessions_have_the_counts_of_their_calls(store: Store) -> None:
    sessions = Sessions(store)
    for name in ("a", "b"):
        sessions.create(name, SessionSettings(max_turns=5))
    session = sessions.by_id[b"a"]
    for index, (status, delivered) in enumerate([(OK, True), (OK, False), ("error", False), (OK, True)]):
        call = CallRecord(call_id=str(index), index=index, status=status, dialect="chat", started_s=0.0, finished_s=9.0)
        call.delivered = delivered
        store.append(session, call)
    assert (session.records, session.last_call_s) == (4, 9.0)
    sessions.close(sessions.by_id[b"b"])
    store.commit()
    again = Sessions(store)
    assert (again.restore(), again.turns) == (4, 3)
    a, b = again.by_id[b"a"], again.by_id[b"b"]
    assert (a.records, a.turns, a.errors, a.started_turns, a.next_index) == (4, 3, 1, 2, 4)
    assert (b.records, b.turns, b.errors, b.started_turns, b.next_index, b.refused) == (0, 0, 0, 0, 0, 0)
    assert (a.closed, b.closed, a.recent, a.key, a.settings.max_turns) == (False, True, None, session.key, 5)

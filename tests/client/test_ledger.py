"""What the ledger keeps through crashes."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from agentcore_rl_toolkit.client import Deadlines, RolloutClient
from agentcore_rl_toolkit.client.ledger import FileLedger, attempts_of, fingerprint, parse_lines
from agentcore_rl_toolkit.contract import Outcome, new_session_id
from agentcore_rl_toolkit.errors import ConfigError

from .conftest import MakeClient

INTENT = {
    "event": "intent", "t": 1.0, "index": 0, "input_id": "i", "session_id": "s1", "attempt": 1, "key": "k", "bucket": "b",
}  # fmt: skip


def test_lines_come_back_in_a_later_process(tmp_path: Path) -> None:
    path = tmp_path / "run/ledger.jsonl"
    ledger = FileLedger(path)
    assert ledger.open() == []
    ledger.append(INTENT)
    ledger.append({"event": "accepted", "session_id": "s1", "t": 2.0, "of_a_later_version": 1})
    ledger.append({"event": "done", "session_id": "s1", "outcome": "ok"})
    ledger.close()
    again = FileLedger(path)
    known = attempts_of(again.open())["s1"]
    assert (known.accepted_s, known.outcome, known.stopped) == (2.0, Outcome.OK, False)
    again.note("s1", event="stopped")
    again.close()
    third = FileLedger(path)
    assert attempts_of(third.open())["s1"].stopped
    third.close()
    assert fingerprint({"b": 1, "a": "ä"}) == fingerprint({"a": "ä", "b": 1}) == "a313805d22cf7d7b"


def test_a_line_that_the_disk_takes_in_part_is_an_error_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    ledger = FileLedger(tmp_path / "ledger.jsonl")
    ledger.open()
    ledger.append(INTENT)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ledger.path.stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            ledger.append({**INTENT, "session_id": "s2"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ledger.append({**INTENT, "session_id": "s3"})
    assert [line["session_id"] for line in parse_lines(ledger.path.read_bytes())] == ["s1", "s3"]
    ledger.close()


def test_a_ledger_torn_at_any_byte_keeps_the_lines_before_and_after(tmp_path: Path) -> None:
    whole = FileLedger(tmp_path / "whole.jsonl")
    whole.open()
    for n in range(3):
        whole.append({**INTENT, "index": n})
    whole.append(["event"])  # type: ignore[arg-type]  # what another program wrote
    whole.close()
    content = whole.path.read_bytes()
    for size in range(len(content) + 1):
        torn = FileLedger(tmp_path / "torn.jsonl")
        torn.path.write_bytes(content[:size])
        kept = torn.open()
        torn.append({**INTENT, "index": 9})
        assert torn.open() == [*kept, {**INTENT, "index": 9}]
        assert len(kept) == content[:size].count(b"}")
        torn.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_others_are_refused_while_the_owner_has_it_open_and_its_forked_child_does_not_keep_it(tmp_path: Path) -> None:
    ledger = FileLedger(tmp_path / "ledger.jsonl")
    ledger.open()

    def is_refused() -> bool:
        try:
            FileLedger(ledger.path).open()
        except ConfigError as e:
            return "in use" in str(e)
        return False

    assert is_refused()
    (ready, tell_ready), (go, tell_go) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(tell_go)
        ledger.append({**INTENT, "session_id": "of the child"})
        os.write(tell_ready, b"y" if is_refused() else b"n")
        os.read(go, 1)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"y"
        ledger.append(INTENT)
        ledger.close()
        other = FileLedger(ledger.path)
        assert other.open() == [INTENT]
        other.close()
    finally:
        os.close(tell_go)
        os.waitpid(child, 0)
        for fd in (ready, tell_ready, go):
            os.close(fd)


def test_ledger_that_cannot_be_written_harms_no_rollout(
    client: RolloutClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = FileLedger.append

    def fill(ledger: FileLedger, line: Mapping[str, Any]) -> None:
        if line["event"] != "intent":
            raise OSError(28, "No space left on device")
        append(ledger, line)

    monkeypatch.setattr(FileLedger, "append", fill)
    items = client.map([{"script": {}}] * 3, ledger=tmp_path / "l.jsonl")
    assert all(item.success for item in items)
    client.flush()
    assert client.stats["stopped"] == 3


def test_a_row_that_is_a_mapping_but_no_dict_is_resumed(client: RolloutClient, tmp_path: Path) -> None:
    row = MappingProxyType({"script": {}, "q": 1})
    assert client.map([row], ledger=tmp_path / "l.jsonl")[0].success
    assert client.map([row], ledger=tmp_path / "l.jsonl", resume=True)[0].success


def test_an_attempt_whose_invoke_was_not_sent_does_not_count(
    make_client: MakeClient, store_url: str, tmp_path: Path
) -> None:
    client, row, path = make_client(retries=0, deadlines=Deadlines(confirm_s=0.2)), {"script": {}}, tmp_path / "l.jsonl"
    about = {"index": 0, "input_id": "i", "attempt": 1, "payload": fingerprint(row), "bucket": store_url}
    path.write_text(
        json.dumps({"event": "intent", "t": 1.0, "session_id": "s" * 33, "key": "exp/i/s.json", **about}) + "\n"
    )
    (item,) = client.map([row], ledger=path, resume=True)
    assert (item.success, item.attempt) == (True, 2), item.error


def test_sessions_of_a_ledger_that_no_row_waits_for_are_stopped(
    client: RolloutClient, store_url: str, tmp_path: Path
) -> None:
    row: dict[str, Any] = {"script": {}}
    before, last, of_no_row, forgotten = (new_session_id() for _ in range(4))

    def intent(session_id: str, index: int, attempt: int) -> dict[str, Any]:
        about = {"index": index, "input_id": "i", "attempt": attempt, "payload": fingerprint(row), "bucket": store_url}
        return {"event": "intent", "t": 1.0, "session_id": session_id, "key": f"exp/i/{session_id}.json", **about}

    lines = [
        *(intent(forgotten, 0, 1), intent(before, 0, 2), {"event": "stopped", "session_id": before}),
        *(intent(last, 0, 3), {"event": "done", "session_id": last, "outcome": "lost", "error": "of before"}),
        {"event": "done", "session_id": last, "cause": "agent"},
        intent(of_no_row, 1, 1),
    ]
    path = tmp_path / "l.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    stopped: list[str] = []
    client.subscribe(lambda event, fields: stopped.append(fields["session_id"]) if event == "stopped" else None)
    (item,) = client.map([row], ledger=path, resume=True)
    assert (item.outcome, item.error, item.session_id, item.attempt) == (Outcome.LOST, "of before", last, 3)
    assert item.cause == "agent"
    client.flush()
    assert sorted(stopped) == sorted([forgotten, last, of_no_row])

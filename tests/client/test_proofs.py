"""A record counts only if it comes from its session: what a writer to the whole store cannot do, and what still interoperates."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.client import WatchSettings
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.errors import ConfigError, InvalidResultError
from agentcore_rl_toolkit.proof import Proof, ProofKey, seal
from agentcore_rl_toolkit.store import open_store
from scripted_runtime import ScriptedRuntime

from .conftest import MakeClient

FORGED = {"rewards": 100.0, "status_code": 200, "stop_reason": "end_turn", "outcome": "ok", "_agent": {"outcome": "ok"}}
WAITING = {"script": {"hang": True}}


def script(**what: Any) -> dict[str, Any]:
    return {"script": {"result": {"rewards": 1.0}, **what}}


def secret_of(runtime: ScriptedRuntime, session_id: str) -> str:
    return str(runtime.sessions[session_id].payload["_rollout"]["proof_key"])


def test_a_record_that_proves_its_origin_counts_as_proven(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    future = client.invoke(script())
    record = future.result(60)
    assert record["rewards"] == 1.0
    assert record["_proof"].startswith("hmac-sha256:")
    assert client.stats["proven"] == 1
    assert "unproven" not in client.stats
    secret = secret_of(runtime, future.session_id)
    assert secret not in json.dumps(record)
    assert record["payload"]["_rollout"]["proof_key"] == "[redacted]"


@pytest.mark.parametrize(
    "how",
    ["without a proof", "with the proof of another session", "moved from another input", "changed", "made-up proof"],
)
def test_a_forged_record_is_invalid_and_its_reward_is_never_seen(
    client: RolloutClient, runtime: ScriptedRuntime, store_url: str, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    store = open_store(store_url)
    victim, other = client.invoke(WAITING, input_id="victim"), client.invoke(script(), input_id="attacker")
    other.result(60)
    key, body = victim.result_key, json.dumps(FORGED).encode()
    if how == "with the proof of another session":
        body = seal(body, key, secret_of(runtime, other.session_id))
    elif how == "moved from another input":
        body = store.get(other.result_key)
    elif how == "changed":
        genuine = seal(json.dumps({**FORGED, "rewards": 0.0}).encode(), key, secret_of(runtime, victim.session_id))
        body = genuine.replace(b'"rewards": 0.0', b'"rewards": 100')
    elif how == "made-up proof":
        body = body[:-1] + b', "_proof": "hmac-sha256:' + b"0" * 64 + b'"}'
    with caplog.at_level(logging.CRITICAL, "agentcore_rl_toolkit.client"):
        store.put(key, body)
        with pytest.raises(InvalidResultError, match="does not prove that it comes from its session"):
            victim.result(60)
    assert (victim.outcome, victim.record) == (Outcome.INVALID, None)
    assert (client.stats["forged"], client.stats["proven"]) == (1, 1)
    assert [r.message for r in caplog.records if "security" in r.message and key in r.message]
    client.flush()
    assert runtime.live == []  # whoever is attacked is stopped as well


def test_records_of_agents_that_cannot_prove_are_accepted_and_counted(make_client: MakeClient) -> None:
    client = make_client()
    items = client.map([script(proves=False), script(), script(proves=False)])
    assert [item.outcome for item in items] == [Outcome.OK] * 3
    assert [item.proof for item in items] == [Proof.UNPROVEN, Proof.PROVEN, Proof.UNPROVEN]
    assert (client.stats["proven"], client.stats["unproven"]) == (1, 2)


def test_with_require_proof_only_proven_records_count(make_client: MakeClient) -> None:
    client = make_client(watch=WatchSettings(require_proof=True))
    items = client.map([script(proves=False), script()])
    assert [item.outcome for item in items] == [Outcome.INVALID, Outcome.OK]
    assert items[0].result is None
    assert "require_proof=True asks for a proof" in str(items[0].error)
    assert "forged" not in client.stats


@pytest.mark.parametrize("bucket", ["file://{private}", "FILE://{private}", "memory://{private}", "{own}/private"])
def test_an_answer_does_not_choose_what_is_read_here(
    client: RolloutClient, runtime: ScriptedRuntime, tmp_path: Path, store_url: str, bucket: str
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "secret.json").write_text('{"rewards": 1.0, "token": "of the trainer"}')
    (private / "secret.alive").write_text("{}")
    bucket = bucket.format(private=private, own=store_url)
    reply = {"status": "processing", "s3_bucket": bucket, "result_key": "secret.json"}
    future = client.submit(script(reply=reply))
    assert "but the client asked for" in str(future.exception(60))
    assert (future.outcome, future.record) == (Outcome.INVALID, None)
    client.flush()
    assert (private / "secret.alive").exists()
    assert runtime.live == []


# ---- later processes


def test_a_later_process_checks_what_an_earlier_one_started(
    make_client: MakeClient, tmp_path: Path, store_url: str
) -> None:
    ledger, store = tmp_path / "run" / "ledger.jsonl", open_store(store_url)
    rows = [script(run_s=0.2) for _ in range(3)]
    first = make_client()
    assert [i.proof for i in first.map(rows, ledger=ledger)] == [Proof.PROVEN] * 3
    first.close()
    keys = [item.key for item in store.list("exp/") if item.key.endswith(".json")]
    store.put(keys[0], json.dumps(FORGED).encode())

    second = make_client()
    items = second.map(rows, ledger=ledger, resume=True)
    assert sorted(str(item.outcome) for item in items) == ["invalid", "ok", "ok"]
    assert sorted(str(item.proof) for item in items) == ["forged", "proven", "proven"]


def test_a_session_adopted_from_the_ledger_must_keep_its_promise(
    make_client: MakeClient, runtime: ScriptedRuntime, tmp_path: Path, store_url: str
) -> None:
    ledger, store = tmp_path / "ledger.jsonl", open_store(store_url)
    started = _start_and_forget(runtime, store_url, ledger)
    store.put(started["key"], json.dumps(FORGED).encode())
    # `prepare` is for invokes, and nothing is sent here.
    client = make_client()
    (item,) = client.map([WAITING], ledger=ledger, resume=True, prepare=lambda session_id, attempt: 1 / 0)
    assert (item.session_id, item.outcome, item.proof) == (started["session_id"], Outcome.INVALID, Proof.FORGED)
    client.flush()
    assert {client.stats[name] for name in ("invalid", "forged", "stopped")} == {runtime.requests["stop"]} == {1}


def _start_and_forget(runtime: ScriptedRuntime, store_url: str, ledger: Path) -> dict[str, Any]:
    """A process that starts one rollout with a ledger and is killed."""
    import subprocess
    import sys

    code = f"""
import os, json
from agentcore_rl_toolkit import RolloutClient
def left(event, fields):
    if event == "accepted":
        print(json.dumps(dict(fields)), flush=True)
        os._exit(0)
client = RolloutClient({runtime.arn!r}, {store_url!r}, "exp", endpoint_url={runtime.url!r})
client.subscribe(left)
client.map([{WAITING!r}], ledger={str(ledger)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    fields: dict[str, Any] = json.loads(done.stdout)
    return fields


def test_the_key_beside_a_ledger_is_for_its_owner_only(make_client: MakeClient, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    with make_client() as client:
        client.map([script()], ledger=ledger)
    key = tmp_path / "ledger.jsonl.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    text = key.read_text()
    assert ProofKey(bytes.fromhex(text)).key.hex() not in ledger.read_text()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["ledger.jsonl", "ledger.jsonl.key"]
    with make_client() as client:
        client.map([script()], ledger=ledger, resume=True)
    assert key.read_text() == text
    key.write_text("nonsense")
    client = make_client()
    for _ in range(2):
        with pytest.raises(ConfigError, match="remove it, and sessions"):
            client.map([script()], ledger=ledger, resume=True)

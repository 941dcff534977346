"""The probe: what a session reaches, said to the doctor and to nobody else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit import AgentCoreRLApp
from agentcore_rl_toolkit.app import AgentSettings
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import ContractError
from serving import Asked, answering

KEY, SECRET = "session-key-0123456789", "p" * 64


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    """Refuses another key than its sessions'; leads away from `/away`; is no gateway at `/page`."""

    def answer(asked: Asked) -> tuple[Any, ...]:
        if asked.path.startswith("/away"):
            return 302, b"", {"location": "/v1/models"}
        good = asked.headers["authorization"] == f"Bearer {KEY}"
        if asked.path.startswith("/large"):
            return 200, b" " * (2**20 - 10) + b'{"data":[]}'
        if asked.path.startswith("/page"):
            return 200 if good else 401, b"<html>a secret page</html>"
        return (200, {"data": [{"id": "other"}, *[{"id": "policy"}] * 20]}) if good else (401, b"no")

    with answering(answer) as url:
        yield url


def payload(store: str, **changed: Any) -> dict[str, Any]:
    block = {"exp_id": "agentcore-rl-doctor", "input_id": "probe", "s3_bucket": store, "proof_key": SECRET, **changed}
    return {"_probe": {}, "_rollout": {k: v for k, v in block.items() if v is not None}}


async def asked(what: dict[str, Any], settings: AgentSettings | None = None) -> dict[str, Any]:
    app = AgentCoreRLApp(settings=settings)
    called = []
    app.rollout_entrypoint(lambda payload: called.append(payload))
    try:
        reply: dict[str, Any] = await app.handlers["main"](what, SimpleNamespace(session_id=new_session_id()))
    finally:
        assert not called, "a probe ran the agent"
    return reply


async def test_a_session_says_what_it_reaches_and_leaves_nothing(tmp_path: Path, gateway: str) -> None:
    reply = await asked(payload(f"file://{tmp_path}", base_url=f"{gateway}/v1", api_key=KEY))
    found = reply["probe"]
    assert reply["status"] == "probed"
    key = reply["probe"]["store"]["text"]
    assert found["store"] == {"ok": True, "text": key}
    assert key.startswith("agentcore-rl-doctor/probe/")
    assert found["gateway"]["text"] == "reached, and the key is accepted"
    assert found["gateway"]["models"] == ["other", *["policy"] * 19]
    assert found["architecture"]
    assert [file for _, _, files in os.walk(tmp_path) for file in files] == []
    assert SECRET not in json.dumps(reply)


@pytest.mark.parametrize(
    ("path", "key", "reached"),
    [("/v1", "another", True), ("/away", KEY, True), ("/page", KEY, True), ("/large", KEY, True), (None, KEY, False)],
)
async def test_a_gateway_that_does_not_serve_is_said_and_nothing_it_answers(
    tmp_path: Path, gateway: str, path: str | None, key: str, reached: bool
) -> None:
    url = "http://127.0.0.1:1/v1" if path is None else gateway + path
    found = (await asked(payload(f"file://{tmp_path}", base_url=url, api_key=key)))["probe"]["gateway"]
    assert (found["ok"], found["reached"]) == (False, reached)
    assert "secret page" not in json.dumps(found)
    assert "models" not in found  # a redirect was not followed


async def test_only_the_doctors_payload_is_a_probe(tmp_path: Path) -> None:
    good = payload(f"file://{tmp_path}")
    wrong: list[tuple[dict[str, Any], AgentSettings | None]] = [
        ({"_probe": {}}, None),
        ({**good, "prompt": "hi"}, None),
        (payload(f"file://{tmp_path}", exp_id="a-training"), None),
        (payload(f"file://{tmp_path}", proof_key=None), None),
        (payload(f"file://{tmp_path}", base_url="file:///etc/passwd"), None),
        (good, AgentSettings(probe=False)),
        (good, AgentSettings(allowed_buckets=("s3://records",))),
    ]
    for what, settings in wrong:
        with pytest.raises(ContractError):
            await asked(what, settings)
    assert os.listdir(tmp_path) == []

"""A store's turns as rows."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.servers.gateway import group
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient
from agentcore_rl_toolkit.gateway.export import export
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine


@pytest.fixture
async def store(engine: ScriptedEngine, start_gateway: Callable[..., Awaitable[Gateway]], tmp_path: Path) -> Path:
    gateway = await start_gateway(engine, store_dir=str(tmp_path / "store"))
    sessions = await GatewayClient(gateway.url).create_sessions_async(
        [new_session_id() for _ in range(2)], metadata={"task": "7"}
    )
    for session in sessions:
        for _ in range(2):
            body = {"messages": [{"role": "user", "content": "hello"}]}
            await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key)
    await gateway.stop()
    return tmp_path / "store"


async def test_every_turn_is_a_line(engine: ScriptedEngine, store: Path, tmp_path: Path) -> None:
    target = tmp_path / "turns.jsonl"
    done = CliRunner().invoke(group, ["export", str(store), str(target)])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [r["completion_ids"] for r in rows] == [c.completion_ids[0] for c in engine.calls]
    assert {len(r["logprobs"]) for r in rows} == {8}
    assert rows[0]["metadata"] == {"task": "7"}


async def test_parquet_has_the_same_rows(engine: ScriptedEngine, store: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    assert export(store, tmp_path / "turns.parquet") == (4, 2)
    rows = parquet.read_table(tmp_path / "turns.parquet").to_pylist()
    assert [r["completion_ids"] for r in rows] == [c.completion_ids[0] for c in engine.calls]
    assert json.loads(rows[0]["metadata"]) == {"task": "7"}


async def test_what_cannot_be_exported_is_said(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="jsonl"):
        export(store, tmp_path / "turns.csv")
    with pytest.raises(ConfigError, match="no calls"):
        export(tmp_path, tmp_path / "turns.jsonl")

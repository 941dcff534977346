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


async def test_parquet_holds_the_same(engine: ScriptedEngine, store: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert export(store, tmp_path / "turns.parquet") == (4, 2)
    rows = parquet.read_table(tmp_path / "turns.parquet").to_pylist()
    assert [r["prompt_ids"] for r in rows] == [c.prompt_ids for c in engine.calls]


async def test_a_data_set_folder_loads_with_datasets(
    engine: ScriptedEngine, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("agentcore_rl_toolkit.gateway.export_dataset.FILE_TOKENS", 1)
    monkeypatch.setattr("agentcore_rl_toolkit.gateway.export_dataset._GROUP_TOKENS", 1)
    folder = tmp_path / "set"
    done = CliRunner().invoke(group, ["export", str(store), str(folder), "--format", "hf"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("4 turns of 2 sessions")
    cache = str(tmp_path / "cache")
    turns = datasets.load_dataset(str(folder), "turns", split="train", cache_dir=cache)
    assert turns["completion_ids"][:] == [c.completion_ids[0] for c in engine.calls]
    assert turns["prompt_ids"][:] == [c.prompt_ids for c in engine.calls]
    assert len(list((folder / "data").glob("turns-*-of-00004.parquet"))) == 4
    sequences = datasets.load_dataset(str(folder), split="train", cache_dir=cache)
    assert json.loads(sequences[0]["metadata"]) == {"task": "7"}
    for row in sequences:
        assert len(row["token_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
        assert [v is not None for v in row["logprobs"]] == [bool(m) for m in row["loss_mask"]]
    trained = sum(sum(row["loss_mask"]) for row in sequences)
    assert trained == sum(len(c.completion_ids[0]) for c in engine.calls)
    with pytest.raises(ConfigError, match="not overwritten"):
        export(store, folder, format="hf")


async def test_turns_that_cannot_be_trained_on_are_a_data_set_of_turns_alone(
    start_gateway: Callable[..., Awaitable[Gateway]], tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    async with ScriptedEngine(gives_tokens=False) as engine:
        gateway = await start_gateway(engine, engine="openai", store_dir=str(tmp_path / "store"))
        [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
        await gateway.stop()
        with pytest.raises(ConfigError, match="no turns"):
            export(tmp_path / "store", tmp_path / "set", format="hf")
        gateway = await start_gateway(engine, engine="openai", store_dir=str(tmp_path / "store"))
        url = f"{gateway.url}/sessions/{session.session_id}/v1/chat/completions"
        await request("POST", url, body={"messages": [{"role": "user", "content": "a"}]}, key=session.api_key)
        await gateway.stop()
    assert export(tmp_path / "store", tmp_path / "set", format="hf") == (1, 1)
    [row] = datasets.load_dataset(str(tmp_path / "set"), split="train", cache_dir=str(tmp_path / "cache"))
    assert (row["trainable"], row["completion_ids"]) == (False, [])


async def test_what_cannot_be_exported_is_said(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="jsonl"):
        export(store, tmp_path / "turns.csv")
    for target, kind in (("turns.jsonl", None), ("turns.parquet", None), ("set", "hf")):
        with pytest.raises(ConfigError, match="no calls"):
            export(tmp_path, tmp_path / target, format=kind)
        assert kind is None or not (tmp_path / target).exists()

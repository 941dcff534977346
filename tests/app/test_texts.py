"""`rollout_text`: which text it gives, and what a record says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit import rollout_text
from agentcore_rl_toolkit.app import texts
from agentcore_rl_toolkit.errors import ConfigError

from .test_entrypoint import run_once

AGENT = """
from agentcore_rl_toolkit import rollout_text

def of_agent(payload, name="system"):
    return rollout_text(payload, name, "its own")
"""


@pytest.fixture
def agent(tmp_path: Path) -> Any:
    """The function of an agent's file in a folder of its own."""
    file = tmp_path / "agent.py"
    file.write_text(AGENT)
    names: dict[str, Any] = {}
    exec(compile(AGENT, str(file), "exec"), names)
    return names["of_agent"]


def test_the_text_is_the_rollouts_else_that_of_the_file_beside_the_agent_else_its_own(
    agent: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = {"_rollout": {"texts": {"system": "tried"}}}
    assert [agent({}), agent({"_rollout": {}}), agent(tried)] == ["its own", "its own", "tried"]
    (tmp_path / texts.FILE).write_text('{"system": "shipped"}')
    assert [agent({}), agent(tried), agent({}, "other")] == ["shipped", "tried", "its own"]
    (tmp_path / "named.json").write_text('{"system": "named"}')
    monkeypatch.setenv("AGENTCORE_RL_TEXTS", str(tmp_path / "named.json"))
    assert agent({}) == "named"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"system": 3}'])
def test_a_file_that_holds_no_texts_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "texts.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("AGENTCORE_RL_TEXTS", str(file))
    with pytest.raises(ConfigError, match=str(file)):
        rollout_text({}, "system", "its own")


async def test_the_record_lists_the_texts_that_its_rollout_read() -> None:
    def reads(payload: Any) -> Any:
        return {"rewards": 1.0, "said": rollout_text(payload, "system", "A") + rollout_text(payload, "hint", "B")}

    async def reads_later(payload: Any) -> Any:
        return {"rewards": 1.0, "said": rollout_text(payload, "system", "C")}

    first, second = await run_once(reads, {}), await run_once(reads_later, {})
    assert (first["said"], first["_agent"]["texts"]) == ("AB", {"system": "A", "hint": "B"})
    assert second["_agent"]["texts"] == {"system": "C"}
    none = await run_once(lambda payload: {"rewards": 1.0}, {})
    assert "texts" not in none["_agent"]

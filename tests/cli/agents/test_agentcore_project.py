"""Agents of AWS's own command line: found by name, with their variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.cli.agents.agentcore_project import variables_of
from agentcore_rl_toolkit.cli.training.stack import find_agent
from agentcore_rl_toolkit.errors import ConfigError

CONFIG: dict[str, Any] = {
    "runtimes": [
        {
            "name": "Shop",
            "entrypoint": "main.py:handler",
            "codeLocation": "app/Shop/",
            "envVars": [{"name": "LEVEL", "value": "hard"}],
        },
        {"name": "Web", "entrypoint": "main.ts", "codeLocation": "app/Web/"},
        {"name": "Gone", "entrypoint": "main.py", "codeLocation": "app/Gone/"},
    ],
    "credentials": [{"name": "shop-openai"}],
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "agentcore").mkdir()
    (tmp_path / "app" / "Shop").mkdir(parents=True)
    (tmp_path / "app" / "Shop" / "main.py").touch()
    (tmp_path / "agentcore" / "agentcore.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path / "app")
    return tmp_path


def test_a_runtime_is_found_by_its_name_in_the_whole_project(project: Path) -> None:
    file = project / "app" / "Shop" / "main.py"
    assert find_agent("Shop") == file
    keys = {"AGENTCORE_CREDENTIAL_SHOP_OPENAI": "placeholder"}
    assert variables_of(file) == {"LOCAL_DEV": "1", "LEVEL": "hard", **keys}
    (project / "agentcore" / ".env.local").write_text("AGENTCORE_CREDENTIAL_SHOP_OPENAI=sk-x\nLEVEL=easy\n")
    assert variables_of(file) == {
        "LOCAL_DEV": "1",
        "LEVEL": "easy",
        "AGENTCORE_CREDENTIAL_SHOP_OPENAI": "sk-x",
    }
    assert variables_of(project / "other.py") == {}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Other", "has no runtime 'Other'; it has Gone, Shop, Web"),
        ("Web", "only agents in Python"),
        ("Gone", "not exist"),
    ],
)
def test_a_runtime_that_cannot_be_served_is_named(project: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        find_agent(name)


def test_a_name_outside_of_a_project_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_agent("Shop") == tmp_path / "Shop"


def test_a_configuration_that_cannot_be_read_is_named(project: Path) -> None:
    (project / "agentcore" / "agentcore.json").write_text("{")
    with pytest.raises(ConfigError, match=r"agentcore.json cannot be read"):
        find_agent("Shop")

"""What a container engine's client says where its library is absent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentcore_rl_toolkit.errors import MissingExtraError
from agentcore_rl_toolkit.isolation.engines import EngineAddress
from agentcore_rl_toolkit.runtime.containers.client import Engine


def test_without_aiodocker_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiodocker", None)
    with pytest.raises(MissingExtraError, match=r"\[containers\]"):
        Engine(EngineAddress(name="docker", url="unix:///nowhere"), tmp_path)

"""Which tier is used, and finding a container engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.isolation import sandbox


@pytest.fixture
def without_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sandbox.no_sandbox.cache_clear()
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    for name in ("DOCKER_HOST", "CONTAINER_HOST", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    yield
    sandbox.no_sandbox.cache_clear()


def test_without_bubblewrap_the_default_is_none_with_the_reason_and_process_is_refused(without_programs: None) -> None:
    tier, why = sandbox.choose_tier()
    assert tier == "none"
    assert "bwrap" in str(why).lower()
    with pytest.raises(ConfigError, match="isolation 'process' is not available here"):
        sandbox.choose_tier("process")
    assert sandbox.choose_tier("none") == ("none", None)

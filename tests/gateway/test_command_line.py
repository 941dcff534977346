"""`agentcore-rl gateway serve` says what is wrong with its options instead of starting with something else."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.servers.gateway import group
from agentcore_rl_toolkit.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--upstream", "http://[::1"], "must look like"),
        (["--store", "/proc/none"], "cannot be used"),
        (["--ready-file", "/nonexistent/ready.json"], "ready file"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_is_served(options: list[str], expected: str) -> None:
    done = CliRunner().invoke(group, ["serve", *options])
    assert isinstance(done.exception, ConfigError)
    assert expected in str(done.exception)

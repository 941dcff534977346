"""`agentcore-rl gateway serve` says what is wrong with its options instead of starting with something else."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.servers.gateway import group
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway import GatewayConfig


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--port", "99999"),
        ("--port", "-1"),
        ("--context-tokens", "-5"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused_by_its_option(option: str, value: str) -> None:
    done = CliRunner().invoke(group, ["serve", option, value])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}'" in done.output


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


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 70_000},
        {"context_tokens": -5},
    ],
)
def test_a_configuration_refuses_the_same(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings)).split("_")[0]):
        GatewayConfig(**settings)

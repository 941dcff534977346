"""What a run costs, and what limits it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.cost import command
from agentcore_rl_toolkit.deploy.cost import GB_HOUR, VCPU_HOUR, Quotas, Run, estimate


def run(**changed: object) -> Run:
    return Run(**{"rollouts": 3600, "minutes": 1.0, "cpu_s": 1.0, "memory_gb": 1.0, "concurrent": 60, **changed})  # type: ignore[arg-type]


def test_an_hour_of_cpu_and_sixty_of_memory_cost_their_price() -> None:
    found = estimate(run())
    assert found.cpu == pytest.approx(VCPU_HOUR)
    assert found.memory == pytest.approx(60 * GB_HOUR)
    assert found.hours == pytest.approx(1.0 + 1 / 60)
    assert found.total == found.cpu + found.memory + found.s3


@pytest.mark.parametrize(
    ("changed", "quotas", "limit"),
    [
        ({"concurrent": 10}, Quotas(), "concurrent rollouts"),
        ({"concurrent": 10_000}, Quotas(new_sessions_per_min=100), "new sessions"),
        ({"concurrent": 10_000, "minutes": 60.0}, Quotas(sessions=500), "sessions alive"),
    ],
)
def test_what_limits_a_run_is_named(changed: dict[str, object], quotas: Quotas, limit: str) -> None:
    assert limit in estimate(run(**changed), quotas).limited_by


def test_the_command_prints_a_table_or_json() -> None:
    options = ["--rollouts", "10000", "--minutes", "5", "--turns", "20"]
    text = CliRunner().invoke(command, options)
    assert text.exit_code == 0, text.output
    assert "per 1,000 rollouts $0.76" in text.output
    found = json.loads(CliRunner().invoke(command, [*options, "--json"]).output)
    assert found["total"] == pytest.approx(7.59, abs=0.01)

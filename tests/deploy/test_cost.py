"""What a run costs."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.deploy.cost import GB_HOUR, VCPU_HOUR, dollars, line


def test_an_hour_of_cpu_and_sixty_of_memory_cost_their_price() -> None:
    found = dollars(3600, minutes=1.0, cpu_s=1.0, memory_gb=1.0)
    assert found == pytest.approx(VCPU_HOUR + 60 * GB_HOUR, abs=0.1)
    assert dollars(3600, minutes=1.0, cpu_s=0.0, memory_gb=0.0) > 60 * 0.125 * GB_HOUR
    assert line(10_000).startswith("10,000 rollouts of 5 min, 12 s of CPU and 0.5 GB cost about $7.5")

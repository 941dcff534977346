"""rLLM: the keys its AgentCore runtime reads, and the calls it makes on our client. No rLLM needed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.backends.rllm import RllmConfig
from agentcore_rl_toolkit.backends.rllm.main import backend_of
from agentcore_rl_toolkit.backends.rllm.settings import mean_gap
from agentcore_rl_toolkit.client import RolloutFuture
from agentcore_rl_toolkit.errors import ConfigError

ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math"


def config(**more: Any) -> RllmConfig:
    return RllmConfig(**{"agent_runtime_arn": ARN, "s3_bucket": "b", "model_path": "Qwen/Qwen3-4B", **more})


def test_the_session_timeout_is_where_rllm_reads_it() -> None:
    overrides = config(session_timeout=120).hydra_overrides()
    assert "rllm.remote_runtime.session_timeout=120.0" in overrides
    assert not any("agentcore.session_timeout" in o for o in overrides)
    assert f"rllm.remote_runtime.agentcore.agent_runtime_arn='{ARN}'" in overrides


@pytest.mark.parametrize(("backend", "key"), [("verl", "rllm.rollout.n"), ("tinker", "training.group_size")])
def test_each_trainer_gets_its_own_keys(backend: str, key: str) -> None:
    overrides = config(backend=backend, group_size=4).hydra_overrides()
    assert f"{key}=4" in overrides
    assert f"rllm/backend={backend}" in overrides
    assert backend_of(overrides) == backend


def test_no_limit_of_how_far_logprobs_may_differ_reaches_the_run_and_a_wrong_one_is_refused() -> None:
    assert mean_gap(config(max_mean_logprob_gap=None).plan().environment["RLLM_MAX_MEAN_LOGPROB_GAP"]) is None
    assert mean_gap(None) == 0.2
    with pytest.raises(ConfigError, match="max_mean_logprob_gap"):
        config(max_mean_logprob_gap=0).plan()


@pytest.mark.parametrize(("backend", "temperature"), [("verl", 0), ("tinker", 0.7)])
def test_a_temperature_that_the_trainer_does_not_compute_at_is_refused(backend: str, temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        config(backend=backend, temperature=temperature)


def test_our_client_takes_the_calls_that_rllm_makes() -> None:
    """The whole list of calls in rLLM's engine/remote_runtime/agentcore_runtime.py, git 9beb6e0."""
    inspect.signature(RolloutClient).bind(agent_runtime_arn=ARN, s3_bucket="b", exp_id="e", tps_limit=25)
    inspect.signature(RolloutClient.invoke_async).bind(
        None, payload={}, session_id="s", input_id="i", base_url="u", model_id="m"
    )
    inspect.signature(RolloutFuture.result_async).bind(None, timeout=1.0)
    inspect.signature(RolloutFuture.elapsed).bind(None)
    assert inspect.iscoroutinefunction(RolloutClient.invoke_async)

"""TRL settings: what is refused, what the plan says. No TRL needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.trl import TrlConfig
from agentcore_rl_toolkit.errors import ConfigError

GOOD = {
    "agent_runtime_arn": "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math",
    "s3_bucket": "file:///data/records",
    "exp_id": "e1",
    "model": "some/model",
    "gateway_url": "http://127.0.0.1:9090",
    "policy_url": "http://127.0.0.1:8000",
}


def written(tmp_path: Path, **more: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in {**GOOD, **more}.items() if v is not None}))
    return path


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"polcy_url": "x"}, "did you mean `policy_url`"),
        ({"num_generations": 1}, "greater than or equal to 2"),
        ({"num_generations": "eight"}, "`rollouts` must be a valid integer"),
        ({"training": {"num_generations": 4}}, "under `training`"),
        ({"policy_url": None}, "no engine would get new weights"),
        ({"training": {"use_vllm": True}}, "two engines"),
        ({"training": {"use_vllm": True, "vllm_mode": "colocate"}, "policy_url": None}, "must be `server`"),
        ({"exp_id": None}, "missing `exp_id`"),
        ({"training": 3}, "must be a valid dictionary"),
        ({"training": {"temperature": 0.7}, "sampling_params": {"temperature": 1.0}}, "temperature"),
        ({"sampling_params": {"temperature": 0.7}}, "training.temperature"),
        ({"training": {"temperature": 0}}, "cannot train at temperature 0"),
        ({"tps_limit": 0}, "tps_limit"),
        ({"submit_timeout_s": -5}, "submit_timeout_s"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        TrlConfig.from_file(written(tmp_path, **change))


@pytest.mark.parametrize(
    "training",
    [{}, {"temperature": 0.7}],
)
def test_agents_are_held_to_what_trl_samples_with(tmp_path: Path, training: dict[str, Any]) -> None:
    config = TrlConfig.from_file(written(tmp_path, training=training, sampling_params={"max_tokens": 8}))
    assert config.shown()["sampling_params"] == config.trained_sampling(), "a promotion reads the temperature there"
    assert config.collect_config().sampling_params == {"max_tokens": 8, **training}


def test_the_plan_shows_what_would_run_without_a_secret(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "2+2", "answer": "4"}\n')
    config = TrlConfig.from_file(written(tmp_path, data_path=str(data), gateway_admin_key="hush"))
    text = config.plan().render()
    assert f"2 in {data}" in text
    assert GOOD["agent_runtime_arn"] in text
    assert "hush" not in text
    assert "hush" not in repr(config)

"""What callers give is checked where they give it; a keyword that nobody knows is an error that says what was meant."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.client import Deadlines, RolloutClient, WatchSettings
from agentcore_rl_toolkit.client.testing import ScriptedRuntime
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.errors import ConfigError

MakeClient = Callable[..., RolloutClient]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("endpoint_ur", "endpoint_url"), ("retrys", "retries"), ("temprature", "temperature"), ("basе_url", "base_url")],
)
def test_an_unknown_keyword_of_the_client_is_an_error_that_names_the_known_one(
    make_client: MakeClient, typed: str, meant: str
) -> None:
    with pytest.raises(ConfigError, match=f"no parameter {typed!r}: did you mean {meant!r}") as caught:
        make_client(**{typed: "x"})
    assert f"rollout_config={{{typed!r}: ...}}" in str(caught.value)


@pytest.mark.parametrize("call", ["invoke", "submit"])
def test_an_unknown_keyword_of_a_call_is_an_error_too(client: RolloutClient, call: str) -> None:
    with pytest.raises(
        ConfigError, match=f"RolloutClient.{call} has no parameter 'sesion_id': did you mean 'session_id'"
    ):
        getattr(client, call)({}, sesion_id="x")


def test_what_goes_to_the_agent_has_a_parameter_of_its_own(make_client: MakeClient, runtime: ScriptedRuntime) -> None:
    client = make_client(rollout_config={"tool_budget": 3, "colour": "red"}, temperature=0.5)
    assert client.extra_config == {"tool_budget": 3, "colour": "red", "temperature": 0.5}
    future = client.invoke({"script": {}}, rollout_config={"colour": "blue"}, top_p=0.9)
    future.result(60)
    block = runtime.sessions[future.session_id].payload["_rollout"]
    assert (block["tool_budget"], block["colour"], block["temperature"], block["top_p"]) == (3, "blue", 0.5, 0.9)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"retries": -1}, "retries must be a whole number >= 0 or None, got -1"),
        ({"retries": "2"}, "retries must be a whole number"),
        ({"deadlines": 5}, "deadlines must be a Deadlines, got 5"),
        ({"watch": {"heartbeat_s": 1}}, "watch must be a WatchSettings"),
        ({"tps_limit": "25"}, "tps_limit must be a number > 0, got '25'"),
        ({"tps_limit": float("nan")}, "tps_limit must be a number"),
        ({"max_pool_connections": 0}, "max_pool_connections must be a whole number >= 1"),
        ({"max_retry_attempts": 1.5}, "max_retry_attempts must be a whole number"),
        ({"sessions_per_minute": 0}, "sessions_per_minute must be a number > 0 or None"),
        ({"on_failure": "ignore"}, "on_failure must be 'return', 'raise' or 'retry'"),
        ({"endpoint_url": "127.0.0.1:8080"}, "endpoint_url must be an address like http://HOST:PORT"),
        ({"rollout_config": ["a"]}, "rollout_config must be a mapping"),
    ],
)
def test_values_are_checked_where_they_are_given(make_client: MakeClient, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_client(**options)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "bucket", ["My Bucket", "a_b/c", "ab", "s3://a b", "-bucket", "10.0.0.1", "a..b", "s3://a..b/c", ""]
)
def test_bucket_names_that_s3_does_not_know_are_refused(runtime: ScriptedRuntime, bucket: str) -> None:
    with pytest.raises(ConfigError, match="bucket"):
        RolloutClient(runtime.arn, bucket, "exp", endpoint_url=runtime.url)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Deadlines(run_s="5"), "run_s must be a number >= 0 or None, got '5'"),  # type: ignore[arg-type]
        (lambda: Deadlines(stop_s=-1), "stop_s must be a number >= 0, got -1"),
        (lambda: WatchSettings(lost_after_s=-1), "lost_after_s must be a number >= 0 or None"),
        (lambda: WatchSettings(read_concurrency=0), "read_concurrency must be a whole number >= 1"),
    ],
)
def test_settings_check_their_values(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"retries": -1}, "retries must be"),
        ({"on_failure": "rais"}, "on_failure must be"),
        ({"timeout": -5}, "timeout must be a number >= 0"),
        ({"timeout": "5"}, "timeout must be a number"),
        ({"resume": "failed"}, "resume must be True, False or 'retry_failed'"),
        ({"max_concurrent_sessions": 2.5}, "max_concurrent_sessions must be a whole number"),
        ({"overrides": ["x"]}, "overrides[0] must be a Mapping"),
        ({"progress": "yes"}, "progress must be True, False or a function"),
    ],
)
def test_a_batch_checks_its_values_before_anything_starts(
    client: RolloutClient, runtime: ScriptedRuntime, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        client.run_batch([{"script": {}}], **options)
    assert says in str(caught.value)
    assert runtime.requests["invoke"] == 0


WITHOUT = """
import json, sys
from agentcore_rl_toolkit.client import RolloutClient
client = RolloutClient(sys.argv[1], sys.argv[2], "exp", endpoint_url=sys.argv[3])
item, = client.map([{}], timeout=30)
print(json.dumps([item.outcome, item.error]))
"""


def outcome_with(runtime: ScriptedRuntime, tmp_path: Path, **env: str) -> tuple[str, str]:
    """How a rollout ends in a process with nothing of AWS but this in its environment."""
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true", **env}
    command = [sys.executable, "-c", WITHOUT, runtime.arn, f"file://{tmp_path}/store", runtime.url]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=300, check=True)
    outcome, error = json.loads(done.stdout)
    assert "Traceback" not in done.stderr
    return outcome, error


def test_missing_credentials_say_what_to_export(runtime: ScriptedRuntime, tmp_path: Path) -> None:
    outcome, error = outcome_with(runtime, tmp_path)
    assert outcome == Outcome.INVALID
    assert error.startswith("no credentials: export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    outcome, error = outcome_with(runtime, tmp_path, AWS_ACCESS_KEY_ID="half")
    assert error.startswith("no credentials: export")

"""What callers give is checked where they give it; a keyword that nobody knows is an error that says what was meant."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.client import RolloutClient, WatchSettings
from agentcore_rl_toolkit.client.settings import check_number
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.errors import ConfigError, ContractError
from scripted_runtime import ARN, ScriptedRuntime

from .conftest import MakeClient


def test_an_unknown_keyword_is_an_error_that_names_the_place_for_the_agents_own(
    make_client: MakeClient, client: RolloutClient
) -> None:
    says = r"no parameter 'retrys'.*; .* rollout_config=\{'retrys': ...\}"
    for call in (
        lambda: make_client(retrys=1),
        lambda: client.invoke({}, retrys=1),
        lambda: client.submit({}, retrys=1),
    ):
        with pytest.raises(ConfigError, match=says):
            call()
    for call, meant in (
        (lambda: make_client(retrys=1), "retries"),
        (lambda: make_client(tps_limits=1), "tps_limit"),
        (lambda: client.invoke({}, temprature=1), "temperature"),
        (lambda: client.invoke({}, inputid="x"), "input_id"),
    ):
        with pytest.raises(ConfigError, match=rf"did you mean '{meant}'\?"):
            call()
    with pytest.raises(ConfigError, match=r"no parameter 'tool_budget'; "):
        client.invoke({}, tool_budget=1)


def test_what_goes_to_the_agent_has_a_parameter_of_its_own(make_client: MakeClient, runtime: ScriptedRuntime) -> None:
    client = make_client(rollout_config={"tool_budget": 3, "colour": "red"}, temperature=0.5)
    assert client.extra_config == {"tool_budget": 3, "colour": "red", "temperature": 0.5}
    future = client.invoke({"script": {}}, rollout_config={"colour": "blue"}, top_p=0.9)
    future.result(60)
    block = runtime.sessions[future.session_id].payload["_rollout"]
    assert (block["tool_budget"], block["colour"], block["temperature"], block["top_p"]) == (3, "blue", 0.5, 0.9)


def test_a_batch_checks_its_values_before_anything_starts(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    for options, says in (
        ({"retries": -1}, "retries must be"),
        ({"timeout": -5}, "timeout must be a number >= 0"),
        ({"resume": "failed"}, "resume must be True, False or 'retry_failed'"),
        ({"max_concurrent_sessions": 2.5}, "max_concurrent_sessions must be a whole number"),
    ):
        with pytest.raises(ConfigError, match=says):
            client.run_batch([{"script": {}}], **options)
    assert runtime.requests["invoke"] == 0
    assert list(client.run_batch([], retries=0)) == []


def test_a_number_is_checked_against_its_bound() -> None:
    cases: list[tuple[dict[str, Any], list[Any], list[Any], str]] = [
        ({"above": 0}, [0.1, 1], [0, -1, True, "1", None], "a number > 0"),
        ({"at_least": 1, "whole": True}, [1, 2], [0, 1.5, True, None], "a whole number >= 1"),
        ({"at_least": 0, "optional": True}, [0, 0.5, None], [-0.1, False], "a number >= 0 or None"),
    ]
    for options, usable, unusable, must_be in cases:
        for value in usable:
            check_number("x", value, **options)
        for value in unusable:
            with pytest.raises(ConfigError, match=f"^x must be {must_be}, got {value!r}$"):
                check_number("x", value, **options)


def test_the_least_settings_are_usable_and_the_usual_ones_are_those_of_the_published_client(
    make_client: MakeClient,
) -> None:
    watch = WatchSettings(max_record_bytes=1, lost_after_s=0, interval_s=0)
    options = {"max_retry_attempts": 1, "max_pool_connections": 1, "sessions_per_minute": 0.5, "tps_limit": 0.5}
    least = make_client(**options, watch=watch)._dispatcher
    assert (least.max_attempts, least.calls_at_once, least.limits) == (1, 1, (0.5, 0.5))
    with RolloutClient(ARN, "memory://usual", "exp") as client:
        assert (client._dispatcher.max_attempts, client._dispatcher.limits, client.retries) == (5, (25, None), 0)


def test_an_arn_without_a_region_is_refused() -> None:
    for arn in ("arn:aws:bedrock-agentcore:us-west-2:1", "arm" + ARN[3:], ARN.replace("us-west-2", "")):
        with pytest.raises(ConfigError, match=f"^Invalid ARN format, cannot extract region: {arn}$"):
            RolloutClient(arn, "memory://arns", "exp")
    assert RolloutClient("arn:aws:x:us-west-2:1:y", "memory://arns", "exp").region == "us-west-2"


def test_a_list_of_payloads_is_checked_before_anything_starts(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    rows: list[Any] = [{"script": {}}, "row 1"]
    with pytest.raises(ConfigError, match="a payload must be a mapping, got str"):
        client.run_batch(rows)
    with pytest.raises(ContractError, match="input_id"):
        client.run_batch(rows[:1] * 2, input_ids=["a", "../b"])
    with pytest.raises(ConfigError, match="got str"):
        list(client.run_batch(iter(rows), 1))
    assert runtime.requests["invoke"] <= 1


def test_an_id_that_is_too_long_for_a_file_is_refused_before_the_invoke(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    (item,) = client.run_batch([{"script": {}}], input_ids=["x" * 256])
    assert isinstance(item.exception, ConfigError)
    assert "at most 255 bytes; shorten its id" in str(item.exception)
    assert runtime.requests["invoke"] == 0


@pytest.mark.parametrize(
    ("files", "tps_limit", "given", "connections"),
    [
        (1_024, 25, 10, 375),
        (1_024, 1, 10, 64),
        (1_024, 25, 11, 11),
        (300, 25, 10, 150),
        (1, 25, 10, 1),
        (resource.RLIM_INFINITY, 100, 10, 512),
    ],
)
def test_connections_follow_the_pace_and_the_limit_of_open_files(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, files: int, tps_limit: int, given: int, connections: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    client = make_client(tps_limit=tps_limit, max_pool_connections=given)
    assert client._dispatcher.calls_at_once == connections


WITHOUT = """
import boto3, json, os, sys
from agentcore_rl_toolkit.client import RolloutClient
for half in ({}, {"AWS_ACCESS_KEY_ID": "half"}):
    os.environ |= half
    boto3.DEFAULT_SESSION = None
    with RolloutClient(sys.argv[1], sys.argv[2], "exp", endpoint_url=sys.argv[3]) as client:
        item, = client.map([{}], timeout=30)
        print(json.dumps([item.outcome, item.error]))
"""


def test_missing_credentials_say_what_to_export(runtime: ScriptedRuntime, tmp_path: Path) -> None:
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    command = [sys.executable, "-c", WITHOUT, runtime.arn, f"file://{tmp_path}/store", runtime.url]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=300, check=True)
    assert "Traceback" not in done.stderr
    for outcome, error in map(json.loads, done.stdout.splitlines()):
        assert outcome == Outcome.INVALID
        assert error.startswith("no credentials: export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    assert len(done.stdout.splitlines()) == 2


def test_the_environments_endpoint_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", "http://127.0.0.1:9")
    with RolloutClient(ARN, "memory://endpoints", "exp") as client:
        assert client.endpoint_url == client.agentcore_client.meta.endpoint_url == "http://127.0.0.1:9"
    monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", "nowhere")
    broken = RolloutClient(ARN, "memory://endpoints", "exp")
    with (
        broken,
        pytest.raises(ConfigError, match="could not make a bedrock-agentcore client: Invalid endpoint: nowhere"),
    ):
        broken.submit({}).result(60)

"""One agent, unchanged, invoked by a trainer of ours and by multi-turn RL jobs."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import httpx
import pytest
from anthropic import Anthropic
from botocore.config import Config
from botocore.exceptions import ClientError
from google import genai
from openai import OpenAI

from agentcore_rl_toolkit import PolicyFailure
from agentcore_rl_toolkit.app import AgentCoreRLApp, AgentSettings
from agentcore_rl_toolkit.app.sagemaker import runtime
from agentcore_rl_toolkit.app.sagemaker.job import job_rollout
from agentcore_rl_toolkit.app.sagemaker.jobs import relay
from agentcore_rl_toolkit.app.sagemaker.runtime import JobCallError, JobRewards, JobRuntime
from agentcore_rl_toolkit.cli.doctor import aws
from agentcore_rl_toolkit.errors import AgentCoreRLError, ConfigError

from ..conftest import StartAgent, new_session, wait_for
from .conftest import JOB, JobServer

AGENT = """
import json, urllib.request

@app.rollout_entrypoint
def run(payload):
    rollout = payload["_rollout"]
    ask = {"model": rollout["model_id"], "messages": [{"role": "user", "content": payload["prompt"]}]}
    headers = {"authorization": f"Bearer {rollout['api_key']}", "content-type": "application/json"}
    call = urllib.request.Request(rollout["base_url"] + "/chat/completions", json.dumps(ask).encode(), headers)
    with urllib.request.urlopen(call) as reply:
        said = json.load(reply)["choices"][0]["message"]["content"]
    return {"rewards": 1.0 if said == payload["answer"] else 0.0}
"""


class Broken(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


def converses(prompt: str, url: str, key: str) -> int:
    """The calls of an agent of boto3's Bedrock client."""
    client = boto3.Session(aws_access_key_id="AKIA", aws_secret_access_key="x").client(
        "bedrock-runtime",
        region_name="us-west-2",
        endpoint_url=f"{url}/bedrock/{key}",
        config=Config(retries={"total_max_attempts": 1}),
    )
    arn = "arn:aws:bedrock:us-west-2:123456789012:application-inference-profile/abc123"
    ask: dict[str, Any] = {"modelId": arn, "messages": [{"role": "user", "content": [{"text": prompt}]}]}
    content = client.converse(**ask, inferenceConfig={"maxTokens": 999})["output"]["message"]["content"]
    events = list(client.converse_stream(**ask)["stream"])
    assert any("contentBlockDelta" in event for event in events)
    with pytest.raises(ClientError) as refused:
        client.converse(modelId=arn, messages=[{"role": "assistant", "content": [{"text": "So"}]}])
    assert refused.value.response["Error"]["Code"] == "ValidationException"
    return len(content)


def run(payload: dict[str, Any]) -> dict[str, Any]:
    """The agent of these tests: it knows nothing of jobs."""
    rollout, do = payload["_rollout"], payload.get("do", "")
    url, key = rollout["base_url"], rollout.get("api_key", "none")
    SEEN["address"] = url
    ask: dict[str, Any] = {"model": rollout["model_id"], "messages": [{"role": "user", "content": payload["prompt"]}]}
    if do == "silent":
        return {"rewards": 1.0}
    if do == "anthropic":
        with Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as claude:
            tools: Any = [{"name": "add", "input_schema": {"type": "object"}}]
            said = claude.messages.create(**ask, max_tokens=999, tools=tools)
            with claude.messages.stream(**ask, max_tokens=99) as stream:
                streamed = stream.get_final_message()
        assert [b.model_dump(exclude={"id"}) for b in streamed.content] == [
            b.model_dump(exclude={"id"}) for b in said.content
        ]
        assert streamed.usage.output_tokens == said.usage.output_tokens == 2
        return {"rewards": len(said.content)}
    if do == "bedrock":
        return {"rewards": converses(payload["prompt"], url, key)}
    if do == "gemini":
        google = genai.Client(api_key=key, http_options={"base_url": url})
        texts = [google.models.generate_content(model="policy", contents=payload["prompt"]).text]
        pieces = google.models.generate_content_stream(model="policy", contents=payload["prompt"])
        texts.append("".join(piece.text or "" for piece in pieces))
        return {"rewards": float(texts == [payload["answer"]] * 2)}
    http_client = httpx.Client(verify=False)  # reading certificates takes longer than the test
    with OpenAI(base_url=url, api_key=key, max_retries=0, http_client=http_client) as client:
        if payload.get("stream"):
            text = ""
            for chunk in client.chat.completions.create(**ask, stream=True):
                text += chunk.choices[0].delta.content or ""
                SEEN[payload["stream"]] = text
        else:
            text = client.chat.completions.create(**ask, temperature=1.0).choices[0].message.content or ""
        if do == "judged":
            judge = client.with_options(base_url=f"{url}/tag/judge")
            judge.chat.completions.create(**ask)
    if do == "fail":
        raise ValueError("a fault of the agent")
    if do == "tokens":
        raise PolicyFailure("tokens")
    if do == "iterate":
        next(iter(()))
    if do == "break":
        raise Broken
    return {"rewards": payload["rewards"] if "rewards" in payload else float(text == payload["answer"])}


SEEN: dict[str, str] = {}


async def until(condition: Callable[[], Any]) -> None:
    await asyncio.to_thread(wait_for, condition)


@functools.cache
def app(**settings: Any) -> AgentCoreRLApp:
    made = AgentCoreRLApp(settings=AgentSettings(**settings))
    made.rollout_entrypoint(on_policy_failure=-1.0)(run)
    return made


async def invoke(payload: dict[str, Any], **settings: Any) -> Any:
    """The answer of the app's handler, as AgentCore's server calls it."""
    return await app(**settings).handlers["main"](payload, SimpleNamespace(session_id=new_session()))


def new_id() -> str:
    return f"trajectory/{uuid.uuid4()}"


async def test_one_agent_serves_a_trainer_and_a_job(jobs: JobServer, tmp_path: Path) -> None:
    row = {"prompt": "2+2", "answer": "4"}
    block = {
        "exp_id": "e",
        "input_id": "i",
        "s3_bucket": f"file://{tmp_path}",
        "base_url": f"{jobs.url}/v1",
        "model_id": "m",
    }
    reply = await invoke({**row, "_rollout": block})
    await until((tmp_path / reply["result_key"]).exists)
    assert json.loads((tmp_path / reply["result_key"]).read_text())["rewards"] == 1.0

    rollout = new_id()
    assert await invoke(jobs.payload(rollout, row)) == {"status": "completed"}
    job = jobs.trajectories[rollout]
    assert (job.status, job.rewards) == ("ready", [[1.0]])
    [asked] = job.samples
    assert asked["messages"] == [{"role": "user", "content": "2+2"}]
    assert (asked["model"], asked["temperature"], asked["top_p"], asked["max_tokens"]) == ("default", 0.7, 0.9, 512)


async def test_the_older_spelling_and_a_prompt_of_words(jobs: JobServer) -> None:
    rollout = new_id()
    metadata = {"job_arn": JOB, "trajectory_id": rollout, "endpoint": jobs.url}
    params = {"temperature": 0, "max_tokens": 64}
    payload = {"instance": "17", "metadata": metadata, "inference_params": params}
    await invoke(payload)
    [asked] = jobs.trajectories[rollout].samples
    assert (asked["messages"][0]["content"], asked["temperature"], asked["max_tokens"]) == ("17", 0, 64)


async def test_a_stream_reaches_the_agent_as_it_comes(jobs: JobServer) -> None:
    rollout = new_id()
    jobs.message = {"role": "assistant", "content": "45"}
    jobs.loop.call_soon_threadsafe(jobs.go_on.clear)
    invoked = asyncio.create_task(invoke(jobs.payload(rollout, {"prompt": "9*5", "answer": "45", "stream": rollout})))
    await until(lambda: SEEN.get(rollout) == "4")
    jobs.loop.call_soon_threadsafe(jobs.go_on.set)
    await invoked
    assert jobs.trajectories[rollout].rewards == [[1.0]]


async def test_an_agent_of_googles_client_is_served(jobs: JobServer) -> None:
    rollout = new_id()
    await invoke(jobs.payload(rollout, {"prompt": "2+2", "answer": "4", "do": "gemini"}))
    assert jobs.trajectories[rollout].rewards == [[1.0]]


async def test_agents_of_anthropics_and_amazons_clients_are_served(jobs: JobServer) -> None:
    rollout = new_id()
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    jobs.message = {"role": "assistant", "content": "so", "tool_calls": [call]}
    await invoke(jobs.payload(rollout, {"prompt": "2+2", "do": "anthropic"}))
    job = jobs.trajectories[rollout]
    assert job.rewards == [[2.0]]  # a text and a call
    assert [asked["max_tokens"] for asked in job.samples] == [512, 99]
    assert job.samples[0]["tools"][0]["function"]["name"] == "add"
    rollout = new_id()
    await invoke(jobs.payload(rollout, {"prompt": "2+2", "do": "bedrock"}))
    assert jobs.trajectories[rollout].rewards == [[2.0]]
    assert [asked["max_tokens"] for asked in jobs.trajectories[rollout].samples] == [512, 512]


@pytest.mark.parametrize(
    ("row", "settings", "status", "reward"),
    [
        ({"do": "tokens"}, {}, "ready", -1.0),
        ({"do": "fail"}, {}, "failed", 0.0),
        ({"do": "fail"}, {"sagemaker_failures": "zero"}, "ready", 0.0),
        ({"do": "iterate"}, {}, "failed", 0.0),
        ({"do": "break"}, {}, "failed", 0.0),
        ({"rewards": None}, {}, "failed", 0.0),
        ({"rewards": "good"}, {}, "failed", 0.0),
    ],
)
async def test_failures_are_reported_by_their_cause(
    jobs: JobServer, row: dict[str, Any], settings: dict[str, Any], status: str, reward: float
) -> None:
    rollout = new_id()
    await invoke(jobs.payload(rollout, {"prompt": "x", **row}), **settings)
    job = jobs.trajectories[rollout]
    assert (job.status, job.rewards) == (status, [[reward]])


async def test_a_rollout_that_sampled_nothing_says_so(jobs: JobServer, caplog: pytest.LogCaptureFixture) -> None:
    await invoke(jobs.payload(new_id(), {"prompt": "2+2", "answer": "4"}))
    assert "sampled nothing" not in caplog.text
    rollout = new_id()
    await invoke(jobs.payload(rollout, {"prompt": "x", "do": "silent"}))
    assert jobs.trajectories[rollout].rewards == [[1.0]]
    assert "sampled nothing" in caplog.text


@pytest.mark.parametrize(
    ("turn_rewards", "given", "taken"),
    [(True, [0.5, 1.0], [0.5, 1.0]), (True, [0.25, 0.5, 1.0], [1.0]), (False, [0.5, 1.0], [1.0])],
)
async def test_a_list_of_rewards_is_sent_by_setting_and_by_its_length(
    jobs: JobServer, turn_rewards: bool, given: list[float], taken: list[float]
) -> None:
    rollout = new_id()
    row = {"prompt": "x", "do": "judged", "rewards": given}
    await invoke(jobs.payload(rollout, row), sagemaker_turn_rewards=turn_rewards)
    assert jobs.trajectories[rollout].rewards == [taken]


async def test_the_answer_comes_at_once_by_setting(jobs: JobServer) -> None:
    rollout = new_id()
    jobs.loop.call_soon_threadsafe(jobs.go_on.clear)
    row = {"prompt": "x", "answer": "4", "stream": rollout}
    assert await invoke(jobs.payload(rollout, row), sagemaker_background=True) == {"status": "in_progress"}
    jobs.loop.call_soon_threadsafe(jobs.go_on.set)
    await until(lambda: rollout in jobs.trajectories and jobs.trajectories[rollout].rewards)


@pytest.mark.parametrize("operation", ["Sample", "CompleteRollout", "UpdateReward"])
@pytest.mark.parametrize("fault", [429, 500, "ThrottlingException", "ExpiredTokenException", -1])
async def test_a_call_that_fails_is_made_again(jobs: JobServer, operation: str, fault: int | str) -> None:
    rollout, faults = new_id(), [fault]
    jobs.fault = lambda name: faults.pop() if name == operation and faults else None
    await invoke(jobs.payload(rollout, {"prompt": "2+2", "answer": "4"}))
    job = jobs.trajectories[rollout]
    assert not faults
    lost = operation == "Sample" and fault == -1  # a sample whose answer was lost is not taken twice
    assert (job.status, job.rewards) == (("failed", [[0.0]]) if lost else ("ready", [[1.0]]))


async def test_a_reward_that_the_job_refuses_fails_the_call(jobs: JobServer) -> None:
    jobs.fault = lambda name: 400 if name == "UpdateReward" else None
    with pytest.raises(AgentCoreRLError, match="could not be reported"):
        await invoke(jobs.payload(new_id(), {"prompt": "x", "answer": "4"}))


def runtime_of(jobs: JobServer, rollout: str) -> JobRuntime:
    job = job_rollout(jobs.payload(rollout))
    assert job is not None
    return JobRuntime(job)


@pytest.mark.parametrize(
    ("fault", "status", "again"),
    [
        *((n, n, n in (429, 500, 503)) for n in (404, 409, 429, 500, 502, 503)),
        *(
            (402, 429, False),
            ("ThrottlingException", 429, True),
            ("ExpiredTokenException", 503, True),
            (-1, 502, False),
        ),
    ],
)
def test_a_refused_call_has_a_status_and_may_be_made_again(
    jobs: JobServer, fault: int | str, status: int, again: bool
) -> None:
    jobs.fault, before = lambda _: fault, len(jobs.calls)
    with pytest.raises(JobCallError) as failed:
        runtime_of(jobs, new_id()).call("sample", TrajectoryId="t", Body=b"{}")
    assert (failed.value.status, failed.value.again, failed.value.ended) == (status, again, False)
    assert len(jobs.calls) == before + 1


def test_a_busy_job_is_asked_for_four_minutes(jobs: JobServer, monkeypatch: pytest.MonkeyPatch) -> None:
    called, slept_s = runtime_of(jobs, new_id()), [0.0]
    clock = SimpleNamespace(monotonic=lambda: 1_000 + sum(slept_s), sleep=slept_s.append)
    monkeypatch.setattr(runtime, "time", clock)
    jobs.fault = lambda _: 500
    with pytest.raises(JobCallError):
        called.sample(b"{}", stream=False)
    assert [most_s / 2 < s <= most_s for s, most_s in zip(slept_s[1:], (0.5, 1.0, 2.0), strict=False)] == [True] * 3
    assert 240 - 8 < sum(slept_s) <= 240


@pytest.mark.parametrize(
    ("text", "status", "ended"),
    [("Trajectory NOT FOUND", 499, True), ("trajectory not found", 500, False), ("Job not found", 404, False)],
)
def test_a_job_that_has_ended_a_rollout_says_so(text: str, status: int, ended: bool) -> None:
    assert JobCallError(text, status=status).ended is ended


async def test_nothing_is_reported_to_a_job_that_has_ended_the_rollout(jobs: JobServer) -> None:
    called = runtime_of(jobs, new_id())
    called.job.ended, jobs.fault = True, lambda _: 404
    with pytest.raises(JobCallError):
        called.sample(b"{}", stream=False)
    before = len(jobs.calls)
    rewards = JobRewards(called.job, called, failures="failed", turn_rewards=False)
    await rewards.put_async("key", b'{"rewards": 1.0}')
    assert (called.job.ended, len(jobs.calls)) == (True, before)


@pytest.mark.parametrize(("fault", "level"), [(404, "ok"), (403, "fail")])
async def test_a_probe_says_whether_the_role_may_report(
    jobs: JobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int, level: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKERJOBRUNTIME", jobs.url)
    block = {"exp_id": "agentcore-rl-doctor", "input_id": "i", "s3_bucket": f"file://{tmp_path}", "proof_key": "p" * 64}
    jobs.fault = lambda _: fault

    async def findings() -> list[tuple[str, str]]:
        report = (await invoke({"_probe": {"job_arn": JOB}, "_rollout": block}))["probe"]
        return [(found.name, found.level) for found in aws.findings(report, block, time.time(), time.time())]

    assert "session jobs" not in dict(await findings())  # an agent that serves none
    monkeypatch.setenv("AGENTCORE_RL_SAGEMAKER_FAILURES", "failed")
    assert ("session jobs", level) in await findings()


@pytest.mark.system
@pytest.mark.parametrize(
    ("operation", "rewards"),
    # Between the two reports its reward is gone: the job refuses to sample again, and a second reward would be another one.
    [("Sample", [[1.0]]), ("CompleteRollout", []), ("UpdateReward", [[1.0]])],
)
def test_no_reward_is_reported_twice_when_the_agent_is_killed(
    start_agent: StartAgent, jobs: JobServer, operation: str, rewards: list[list[float]]
) -> None:
    rollout, reached = new_id(), threading.Event()
    agent = start_agent(AGENT, env=jobs.env)
    payload = jobs.payload(rollout, {"prompt": "2+2", "answer": "4"})

    def kill(name: str) -> int | None:
        if name == operation and not reached.is_set():
            agent.process.kill()
            agent.process.wait(10)
            reached.set()
            return -1
        return None

    jobs.fault = kill
    with pytest.raises((OSError, http.client.HTTPException)):
        agent.invoke(payload, new_session())
    again = start_agent(AGENT, env=jobs.env)
    for _ in range(2):  # the second time it is delivered once more
        assert again.invoke(payload, new_session()) == (200, {"status": "completed"})
    assert jobs.trajectories[rollout].rewards == rewards


async def test_a_call_to_another_address_or_after_the_end_of_its_rollout_is_refused(jobs: JobServer) -> None:
    await invoke(jobs.payload(new_id(), {"prompt": "2+2", "answer": "4"}))
    ended = SEEN["address"].partition(str(relay().port))[2]
    connection = http.client.HTTPConnection("127.0.0.1", relay().port, timeout=10)
    for path in ("/v1/chat/completions", "/other/v1/chat/completions", f"{ended}/chat/completions"):
        connection.request("POST", path, b"{}", {"authorization": "Bearer other"})
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["type"]) == (404, "invalid_request_error")
    connection.close()


def test_an_agent_that_reports_its_rewards_itself_is_refused() -> None:
    code = "def sagemaker_rft_handler(func):\n    def wrapper(payload):\n        return func(payload)\n    return wrapper\n"
    module: dict[str, Any] = {"__name__": "sagemaker.train.rft.decorators"}
    exec(code, module)
    with pytest.raises(ConfigError, match="sagemaker_rft_handler"):
        AgentCoreRLApp().rollout_entrypoint(module["sagemaker_rft_handler"](lambda payload: {}))


def test_settings_say_what_they_take() -> None:
    with pytest.raises(ConfigError, match="'failed' or 'zero'"):
        AgentSettings.from_env({"AGENTCORE_RL_SAGEMAKER_FAILURES": "no"})

"""The gateway, the agents and the trainer's weights against vLLM itself (its build for CPUs), in both modes of the gateway."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentcore_rl_toolkit.backends import CollectConfig, GroupRequest, collect_async
from agentcore_rl_toolkit.backends.collection.teacher import Teacher
from agentcore_rl_toolkit.cli.servers.vllm import MODEL_ID
from agentcore_rl_toolkit.cli.training.quickstart import example
from agentcore_rl_toolkit.cli.training.services import Services
from agentcore_rl_toolkit.cli.training.stack import QUIET, Upstream, start
from agentcore_rl_toolkit.client import RolloutClient
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import WeightsError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, SessionHandle, UpstreamConfig
from agentcore_rl_toolkit.gateway.capture.record import CONSTRAINED, LOST_WEIGHTS
from agentcore_rl_toolkit.gateway.config import Limits
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.policy import WEIGHTS_DIR, load_policy, problems
from agentcore_rl_toolkit.weights import EngineAddress, Publisher, prove, publish, write_checkpoint
from agentcore_rl_toolkit.weights.publishing import probe_prompt

from .conftest import VLLM

pytestmark = pytest.mark.slow
nightly = pytest.mark.nightly
EXACT = 1e-4  # float32 on both sides; another order of additions
Checked = Callable[[str, object], None]
USER = {"role": "user", "content": problems("train", 1, seed=0)[0].prompt}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculate.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
modes = pytest.mark.parametrize("mode", ["relay", "token"])


@pytest.fixture
async def gateway(vllm: VLLM, request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    """A gateway in the mode of the test."""
    token = {"model_dir": str(WEIGHTS_DIR), "context_tokens": 1024}
    running = Gateway(
        GatewayConfig(
            upstreams=(UpstreamConfig(url=vllm.url, engine="vllm"),),
            model_id="policy",
            limits=Limits(outage_s=900),
            **(token if "token" in request.node.name else {}),  # type: ignore[arg-type]
        )
    )
    await running.start()
    yield running
    await running.stop(grace_s=0.2)


async def opened(gateway: Gateway) -> SessionHandle:
    return (await GatewayClient(gateway.url).create_sessions_async([new_session_id()]))[0]


async def turns_of(gateway: Gateway, session: SessionHandle) -> list[Any]:
    found = await GatewayClient(gateway.url).fetch_async([session.session_id])
    return list(found[session.session_id].turns)


async def chat(session: SessionHandle, **asked: Any) -> dict[str, Any]:
    body = {"model": "policy", "messages": [USER], "max_tokens": 24, **asked}
    status, reply = await request(
        "POST", session.base_url + "/chat/completions", body=body, key=session.api_key, timeout_s=1500
    )
    assert status == 200, reply
    found: dict[str, Any] = json.loads(reply)
    return found


def prompt_logprobs(vllm: VLLM, ids: list[int]) -> list[float | None]:
    """What vLLM says of these tokens when it reads them as a prompt."""
    body = {"model": "policy", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    asked = urllib.request.Request(
        vllm.url + "/v1/completions", data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=300) as reply:
        answer = json.load(reply)["choices"][0]["prompt_logprobs"]
    return [None if entry is None else entry[str(i)]["logprob"] for entry, i in zip(answer, ids, strict=True)]


def gap_to_vllm(vllm: VLLM, prompt: Any, completion: Any, recorded: Any) -> float:
    reply = prompt_logprobs(vllm, [*prompt, *completion])[len(prompt) :]
    return max(abs(a - b) for a, b in zip(reply, recorded, strict=True))  # type: ignore[operator]


async def metric(vllm: VLLM, name: str) -> float:
    _, page = await request("GET", vllm.url + "/metrics")
    lines = [line for line in page.decode().splitlines() if line.partition("{")[0] == f"vllm:{name}"]
    assert lines, f"vLLM has no {name}"
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def sampling(vllm: VLLM, since: float) -> None:
    """Return when vLLM has sampled a few tokens since its counter stood at `since`."""
    async with asyncio.timeout(120):
        while await metric(vllm, "generation_tokens_total") < since + 4:  # noqa: ASYNC110  # vLLM tells nobody
            await asyncio.sleep(0.01)


@nightly
@modes
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_every_dialect_is_recorded_with_vllms_own_logprobs(
    vllm: VLLM, gateway: Gateway, mode: str, stream: bool, checked: Checked
) -> None:
    session = await opened(gateway)
    root = session.base_url.removesuffix("/v1")
    async with (
        openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0, timeout=300) as llm,
        anthropic.AsyncAnthropic(base_url=root, api_key=session.api_key, max_retries=0, timeout=300) as claude,
    ):
        made: list[Any] = [
            await llm.chat.completions.create(model="policy", messages=[USER], max_tokens=16, stream=stream),  # type: ignore[call-overload]
            await llm.responses.create(model="policy", input="2 + 3", max_output_tokens=16, stream=stream),
            await claude.messages.create(model="policy", messages=[USER], max_tokens=16, stream=stream),  # type: ignore[call-overload]
        ]
        if stream:
            for reply in made:
                async for _ in reply:
                    pass
    turns = await turns_of(gateway, session)
    assert [turn.why_untrainable() for turn in turns] == [None] * 3
    worst = max(gap_to_vllm(vllm, t.prompt_ids, t.completion_ids, t.logprobs) for t in turns)
    assert worst <= EXACT
    checked(f"{mode}, {'streams' if stream else 'whole'}: chat, responses, messages", f"gap {worst:.1e}")


@modes
async def test_vllm_and_trainer_agree_at_the_sessions_temperature(
    vllm: VLLM, gateway: Gateway, mode: str, tmp_path: Path, checked: Checked
) -> None:
    model, _ = load_policy()
    publisher = Publisher([EngineAddress(url=vllm.url, engine="vllm")], tmp_path, temperature=0.7)
    await asyncio.to_thread(publisher.publish, model, 70)
    assert publisher.gap <= EXACT
    client = GatewayClient(gateway.url)
    (session,) = await client.create_sessions_async([new_session_id()], sampling_params={"temperature": 0.7})
    await chat(session, temperature=0.2)
    [turn] = await turns_of(gateway, session)
    assert turn.sampling["temperature"] == 0.7, "the session's temperature wins over the agent's, and is recorded"
    ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
    with torch.inference_mode():
        logits_TV = model(input_ids=ids).logits[0, len(turn.prompt_ids) - 1 : -1].float()
    own_T = (logits_TV / 0.7).log_softmax(-1)[range(len(turn.completion_ids)), list(turn.completion_ids)]
    gap = max(abs(a - b) for a, b in zip(own_T.tolist(), turn.logprobs, strict=True))
    assert gap <= EXACT
    checked(f"{mode}, temperature 0.7: logprobs of vLLM and of the trainer", f"gap {max(gap, publisher.gap):.1e}")


@nightly
@modes
async def test_tools_several_choices_and_forms(vllm: VLLM, gateway: Gateway, mode: str, checked: Checked) -> None:
    session = await opened(gateway)
    calls = 0
    for seed in range(8):
        reply = await chat(session, tools=[CALCULATOR], seed=seed, max_tokens=64)
        calls += bool(reply["choices"][0]["message"].get("tool_calls"))
    assert calls >= 1
    reply = await chat(session, n=3)
    assert len(reply["choices"]) == 3
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    await chat(session, response_format=form, max_tokens=40)
    turns = await turns_of(gateway, session)
    assert [t.why_untrainable() for t in turns[:-1]] == [None] * 11
    assert turns[-1].why_untrainable() == CONSTRAINED
    held = turns[-1]
    result = prompt_logprobs(vllm, [*held.prompt_ids, *held.completion_ids])[len(held.prompt_ids) :]
    checked(f"{mode}: tool calls parsed, n=3", f"{calls} of 8 answers call, 3 turns")
    checked(
        f"{mode}: answer held to a schema is marked",
        f"logprobs sum {sum(held.logprobs):.1f}, free ones {sum(v for v in result if v is not None):.1f}",
    )


@nightly
@modes
async def test_an_agent_that_hangs_up_ends_the_call_at_vllm(vllm: VLLM, gateway: Gateway, mode: str) -> None:
    session, before = await opened(gateway), await metric(vllm, "generation_tokens_total")

    async def hang_up_at_the_first_chunk(llm: openai.AsyncOpenAI) -> None:
        reply = await llm.chat.completions.create(
            model="policy",
            messages=[USER],  # type: ignore[list-item]
            stream=True,
            max_tokens=900,
            extra_body={"ignore_eos": True},
        )
        async for _ in reply:
            break
        await reply.close()

    # Sixteen at once: alone, this small model may sample 900 tokens before a busy machine has passed a hang-up on.
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        await asyncio.gather(*(hang_up_at_the_first_chunk(llm) for _ in range(16)))
    async with asyncio.timeout(60):
        while await metric(vllm, "num_requests_running"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert 0 < await metric(vllm, "generation_tokens_total") - before < 16 * 900, "all were sampled to their ends"
    assert await turns_of(gateway, session) == []


@nightly
@modes
async def test_the_end_is_ignored_when_asked_for(gateway: Gateway, mode: str, checked: Checked) -> None:
    session = await opened(gateway)
    await chat(session, max_tokens=120, ignore_eos=True)
    [turn] = await turns_of(gateway, session)
    assert len(turn.completion_ids) == 120
    checked(f"{mode}: ignore_eos", "120 of 120 tokens")


@nightly
@modes
async def test_sixty_four_rollouts_of_the_math_agent(vllm: VLLM, mode: str, checked: Checked, tmp_path: Path) -> None:
    key = secrets.token_urlsafe(24)
    rows = [{"prompt": p.prompt, "answer": p.answer} for p in problems("train", 8, seed=1)]
    model, _ = load_policy()
    publish(write_checkpoint(model, tmp_path / "weights"), 0, [EngineAddress(url=vllm.url, engine="vllm")])
    with Services(tmp_path / "logs", env={**QUIET, "AGENTCORE_RL_GATEWAY_ADMIN_KEY": key}) as services:
        agent = example("strands_math_agent/arithmetic_app.py")
        stack = await asyncio.to_thread(
            start,
            services,
            agent,
            folder=tmp_path,
            model=None,
            admin_key=key,
            upstream=Upstream(url=vllm.url, engine="vllm", relayed=mode != "token"),
            engine="vllm",
        )
        with (
            RolloutClient(
                stack.agent_arn,
                stack.store,
                "vllm",
                model_id=MODEL_ID,
                endpoint_url=stack.runtime_url,
                tps_limit=1000,
            ) as client,
            GatewayClient(stack.gateway_url, admin_key=key) as gateway,
        ):
            gateway.set_weight_version(0)
            groups = await collect_async(
                [GroupRequest(input_id=f"{i}", payload=row, n=8) for i, row in enumerate(rows)],
                client=client,
                gateway=gateway,
                config=CollectConfig(max_concurrent=32, rollout_timeout_s=900),
            )
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    usable = [rollout for rollout in rollouts if rollout.usable]
    assert len(usable) == len(rollouts) == 64
    vllms = trainers = 0.0
    for rollout in usable:
        assert rollout.trajectory is not None
        for sequence in rollout.trajectory.sequences:
            ids = list(sequence.token_ids)
            reply = prompt_logprobs(vllm, ids)
            with torch.inference_mode():
                logits_TV = model(input_ids=torch.tensor([ids])).logits[0]
            own_T = torch.log_softmax(logits_TV[:-1], -1).gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()
            for t, (sampled, recorded) in enumerate(zip(sequence.loss_mask, sequence.logprobs, strict=True)):
                if sampled:
                    assert recorded is not None
                    vllms = max(vllms, abs(recorded - (reply[t] or 0.0)))
                    trainers = max(trainers, abs(recorded - own_T[t - 1]))
    assert vllms <= EXACT
    assert trainers <= EXACT
    branches = sum(rollout.trajectory.report.branches for rollout in usable if rollout.trajectory is not None)
    found = f"64 of 64 usable, {branches} branches; gap to vLLM {vllms:.1e}, to transformers {trainers:.1e}"
    checked(f"{mode}: rollouts of the math agent", found)


def moved(seed: int, size: float) -> Any:
    """The shipped policy after a step of this size."""
    model, _ = load_policy()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn_like(parameter).sign())
    return model


@nightly
async def test_a_teachers_logprobs_and_texts_of_given_ids(vllm: VLLM, tmp_path: Path, checked: Checked) -> None:
    teacher, model = Teacher(vllm.url), load_policy()[0]
    publisher = Publisher([EngineAddress(url=vllm.url, engine="vllm")], tmp_path / "weights")
    await asyncio.to_thread(publisher.publish, model, 10)
    await asyncio.to_thread(teacher.check, WEIGHTS_DIR)
    ids_T = torch.tensor(probe_prompt(model.config.vocab_size))
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(model(input_ids=ids_T[None]).logits[0, :-1].float(), -1)
    wanted = logprobs_TV.gather(1, ids_T[1:, None])[:, 0].tolist()
    apart = max(abs(a - b) for (a, _), b in zip(await teacher.read(ids_T.tolist()), wanted, strict=True))
    assert apart <= EXACT
    checked("a teacher reads the student's ids", f"differs by {apart:.1e}")


@pytest.mark.system
def test_weights_arrive_and_one_that_does_not_is_caught(vllm: VLLM, tmp_path: Path, checked: Checked) -> None:
    address = EngineAddress(url=vllm.url, engine="vllm")
    before, after = load_policy()[0], moved(1, 1e-3)
    publisher = Publisher([address], tmp_path / "weights")
    assert publisher.publish(after, 11) == 11
    assert publisher.gap <= EXACT
    checked("whole weights published and proved, tied head too", f"gap {publisher.gap:.1e}")
    old, new = dict(before.named_parameters()), write_checkpoint(after, tmp_path / "new")
    prompt, found = probe_prompt(after.config.vocab_size), []
    for name in old:
        spoilt = shutil.copytree(new, tmp_path / "spoilt", dirs_exist_ok=True)
        save_file({**load_file(new / "model.safetensors"), name: old[name].detach()}, spoilt / "model.safetensors")
        publish(spoilt, 12, [address])
        with pytest.raises(WeightsError, match="the weights did not arrive"):
            prove(after, prompt, [address], 12)
        found.append(name)
    checked("one tensor not replaced", f"caught in {len(found)} of {len(old)} tensors")
    with pytest.raises(WeightsError, match="500"):  # a folder that is not there
        publish(tmp_path / "none", 13, [address])
    assert address.connect().sample(prompt, n=1, max_tokens=2, seed=0), "it was resumed"
    publisher.publish(before, 14)


async def calling_until(happened: asyncio.Event, session: SessionHandle) -> None:
    """A session with a call under way at all times: this small model samples a single long one faster than weights arrive."""
    while not happened.is_set():
        await chat(session, max_tokens=800, ignore_eos=True)


@nightly
async def test_weights_that_change_under_a_call_are_told_apart_in_token_mode(
    vllm: VLLM, gateway: Gateway, tmp_path: Path, checked: Checked
) -> None:
    address = EngineAddress(url=vllm.url, engine="vllm")
    folder = write_checkpoint(load_policy()[0], tmp_path / "same")
    publish(folder, 31, [address])
    sessions, published = [await opened(gateway) for _ in range(4)], asyncio.Event()
    calls = [asyncio.ensure_future(calling_until(published, session)) for session in sessions]
    await sampling(vllm, await metric(vllm, "generation_tokens_total"))
    await asyncio.to_thread(publish, folder, 32, [address], in_flight="keep")
    published.set()
    await asyncio.gather(*calls)
    turns = [turn for session in sessions for turn in await turns_of(gateway, session)]
    for turn in turns:
        versions = turn.token_versions()
        assert versions == sorted(versions)
        assert (turn.weight_version_first, turn.weight_version_last) == (versions[0], versions[-1])
    [crossed, *_] = [v for turn in turns if set(v := turn.token_versions()) == {31, 32}]
    checked("weights changed under a running call", f"{crossed.count(31)} tokens of 31, {crossed.count(32)} of 32")


@nightly
async def test_kill_9_in_the_middle_costs_no_call_in_token_mode(
    vllm: VLLM, gateway: Gateway, tmp_path: Path, checked: Checked
) -> None:
    address, client = EngineAddress(url=vllm.url, engine="vllm"), GatewayClient(gateway.url)
    folder = write_checkpoint(load_policy()[0], tmp_path / "weights")
    await asyncio.to_thread(publish, folder, 41, [address])
    await client.set_weight_version_async(41)
    sessions = [await opened(gateway) for _ in range(8)]
    await chat(sessions[0])  # vLLM has said its version once
    killed = asyncio.Event()
    calls = [asyncio.ensure_future(calling_until(killed, session)) for session in sessions]
    await sampling(vllm, await metric(vllm, "generation_tokens_total"))
    await asyncio.to_thread(vllm.kill)
    killed.set()
    async with asyncio.timeout(120):
        while gateway.router.waiting < len(calls):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    _, body = await request("GET", gateway.url + "/healthz")
    assert json.loads(body)["status"] == "all engines are down"
    await asyncio.to_thread(vllm.start)
    await asyncio.gather(*calls)
    turns = [(await turns_of(gateway, session))[-1] for session in sessions]
    assert {turn.why_untrainable() for turn in turns} == {LOST_WEIGHTS}, "it has its first weights now"
    assert {turn.weight_version_last for turn in turns} == {None}
    await asyncio.to_thread(publish, folder, 42, [address])
    await client.set_weight_version_async(42)
    later = await opened(gateway)  # those before are closed: their turns were fetched
    await chat(later)
    [last] = await turns_of(gateway, later)
    assert (last.why_untrainable(), last.weight_version_last) == (None, 42)
    checked(
        "kill -9 in the middle of 8 calls", "8 of 8 answered, marked as of the first weights until the next publish"
    )

"""`agentcore-rl serve` as a process: official clients of every API call it, without a session."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from aiohttp import ClientSession
from anthropic import Anthropic
from botocore.config import Config
from google import genai
from openai import OpenAI

from agentcore_rl_toolkit.cli.servers.endpoint import Front
from agentcore_rl_toolkit.gateway import Gateway, GatewayConfig, Limits, UpstreamConfig
from agentcore_rl_toolkit.policy import WEIGHTS_DIR
from scripted_engine import Fault, ScriptedEngine
from serving import OURS, serving, wait_for

QUESTION = "What is 3 + 4?"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("serve")
    with serving(folder, "serve", str(WEIGHTS_DIR)) as ready:
        yield ready["url"]


def test_clients_of_every_api_get_an_answer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16}
    with OpenAI(base_url=f"{url}/v1", api_key="none") as openai:
        chat = openai.chat.completions.create(**asked)
        assert chat.choices[0].message.content
        assert chat.usage is not None
        with openai.chat.completions.create(**asked, stream=True) as pieces:
            assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert openai.responses.create(model="m", input=QUESTION, max_output_tokens=16).output_text
        assert [model.id for model in openai.models.list()]
    with Anthropic(base_url=url, api_key="none") as anthropic, anthropic.messages.stream(**asked) as stream:
        assert stream.get_final_text()
    with genai.Client(api_key="none", http_options={"base_url": url}) as google:
        assert google.models.generate_content(model="m", contents=QUESTION, config={"max_output_tokens": 16}).text
    bedrock = boto3.client(
        "bedrock-runtime",
        endpoint_url=f"{url}/bedrock",
        region_name="us-west-2",
        config=Config(retries={"total_max_attempts": 1}),
    )
    message = {"role": "user", "content": [{"text": QUESTION}]}
    said = bedrock.converse_stream(modelId="m", messages=[message], inferenceConfig={"maxTokens": 16})
    assert any("contentBlockDelta" in event for event in said["stream"])
    said["stream"].close()
    bedrock.close()


def test_only_models_are_served(url: str) -> None:
    for path in ("/admin/sessions", "/metrics", "/sessions/serve-1/v1/models", "/update_weights"):
        refused = httpx.post(url + path, json={})
        assert (refused.status_code, "there is no route" in refused.text) == (404, True)
    assert httpx.get(f"{url}/v1/models", headers={"origin": "http://elsewhere.test"}).status_code == 403
    assert httpx.get(f"{url}/v1/models", headers={"host": "elsewhere.test"}).status_code == 421


def test_an_address_of_other_machines_needs_a_key(tmp_path: Path) -> None:
    done = subprocess.run([*OURS, "serve", "--host", "0.0.0.0"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "AGENTCORE_RL_SERVE_KEY" in done.stderr


async def test_requests_need_the_key_and_leave_no_session() -> None:
    """A request's session is deleted, also when its client hangs up."""
    async with ScriptedEngine() as engine:
        upstream = UpstreamConfig(url=engine.url, engine="vllm")
        limits = Limits(connect_s=60.0)
        gateway = Gateway(GatewayConfig(upstreams=(upstream,), admin_key="admin", session_keys=False, limits=limits))
        gateway.handle = Front(gateway, "secret").handle
        await gateway.start()
        url = f"{gateway.url}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True}
        async with ClientSession() as client:
            for key, status in (("wrong", 401), ("secret", 200)):
                async with client.post(url, json=body, headers={"authorization": f"Bearer {key}"}) as reply:
                    assert (reply.status, bool(await reply.read())) == (status, True)
            assert gateway.sessions.by_id == {}
            engine.faults.append(Fault(gate=asyncio.Event()))
            hanging = asyncio.create_task(
                client.post(url, json=body, headers={"authorization": "Bearer secret"}).__aenter__()
            )
            await asyncio.to_thread(wait_for, lambda: gateway.sessions.by_id and engine.active)
            hanging.cancel()
            await asyncio.to_thread(wait_for, lambda: not gateway.sessions.by_id and not engine.active)
        await gateway.stop(grace_s=0.2)

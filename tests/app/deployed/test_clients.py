"""Model calls of unmodified clients, made before their rollout begins, reach the session's gateway, and nothing else does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import anthropic
import boto3
import httpx
import openai
import pytest
import requests
from botocore.config import Config
from google import genai
from google.genai.types import HttpOptions
from strands import Agent, tool
from strands.models.bedrock import BedrockModel

from agentcore_rl_toolkit._portal import Portal
from agentcore_rl_toolkit.app.deployed.clients import install
from agentcore_rl_toolkit.app.deployed.routes import Route, routed
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import GatewayClient, SessionHandle
from scripted_engine import ScriptedEngine
from serving import Asked, answering, gateway_before

SECRET = "sk-the-agents-own"
USER: Any = [{"role": "user", "content": "hi"}]
OPENAI = "https://api.openai.com/v1/chat/completions"
AWS = {"aws_access_key_id": "AKIASECRET", "aws_secret_access_key": SECRET, "region_name": "us-west-2"}
Call = Callable[[], Awaitable[str]]


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    portal, running = Portal("engine-of-the-test"), ScriptedEngine()
    portal.call(running.start())
    yield running
    portal.call(running.stop())
    portal.close()


@pytest.fixture(scope="module")
def gateway(engine: ScriptedEngine) -> Iterator[GatewayClient]:
    install()
    with gateway_before(engine.url) as running, GatewayClient(running.url) as client:
        yield client


@pytest.fixture
def session(gateway: GatewayClient) -> SessionHandle:
    return gateway.create_sessions([new_session_id()])[0]


@pytest.fixture
def route(session: SessionHandle) -> Route:
    return Route(base_url=session.base_url, api_key=str(session.api_key))


async def openai_async() -> AsyncIterator[Call]:
    async with openai.AsyncOpenAI(api_key=SECRET, max_retries=0) as client:

        async def call() -> str:
            reply = await client.chat.completions.create(model="m", messages=USER)
            return str(reply.choices[0].message.content)

        yield call


async def openai_responses_sync() -> AsyncIterator[Call]:
    with openai.OpenAI(api_key=SECRET, base_url="https://bedrock-mantle.us-west-2.api.aws/openai/v1") as client:

        async def call() -> str:
            with await asyncio.to_thread(client.responses.create, model="m", input="hi", stream=True) as stream:
                return "".join(e.delta for e in stream if e.type == "response.output_text.delta")

        yield call


async def anthropic_stream() -> AsyncIterator[Call]:
    async with anthropic.AsyncAnthropic(api_key=SECRET, max_retries=0) as client:

        async def call() -> str:
            async with client.messages.stream(model="m", max_tokens=9, messages=USER) as stream:
                return str(await stream.get_final_text())

        yield call


async def gemini_sync_and_async() -> AsyncIterator[Call]:
    with genai.Client(api_key=SECRET, http_options=HttpOptions(timeout=60_000)) as client:

        async def call() -> str:
            whole = await asyncio.to_thread(client.models.generate_content, model="g", contents="hi")
            stream = await client.aio.models.generate_content_stream(model="g", contents="hello again")
            return str(whole.text) + "".join([str(part.text or "") async for part in stream])

        yield call
        await client.aio.aclose()


async def bedrock_converse() -> AsyncIterator[Call]:
    client = boto3.Session(**AWS).client("bedrock-runtime")

    async def call() -> str:
        asked = {"modelId": "us.anthropic.claude-v1:0", "messages": [{"role": "user", "content": [{"text": "hi"}]}]}
        reply = await asyncio.to_thread(client.converse, **asked)
        return str(reply["output"]["message"]["content"][0]["text"])

    yield call


async def bedrock_invoke_stream() -> AsyncIterator[Call]:
    client = boto3.Session(**AWS).client("bedrock-runtime")

    async def call() -> str:
        body = json.dumps({"anthropic_version": "bedrock-2023-05-31", "max_tokens": 9, "messages": USER})
        reply = await asyncio.to_thread(
            client.invoke_model_with_response_stream, modelId="arn:aws:bedrock:us-west-2:1:x/y", body=body
        )
        events = [json.loads(event["chunk"]["bytes"]) for event in reply["body"]]
        return "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")

    yield call


async def requests_and_aiohttp() -> AsyncIterator[Call]:
    headers = {"Authorization": f"Bearer {SECRET}", "x-api-key": SECRET}
    async with aiohttp.ClientSession(headers=headers) as client:
        sync = requests.Session()
        sync.headers.update(headers)

        async def call() -> str:
            body = {"model": "m", "messages": USER}
            whole = await asyncio.to_thread(sync.post, OPENAI, json=body)
            async with client.post(OPENAI, json={**body, "temperature": 0.5}) as reply:
                texts = [whole.json(), await reply.json()]
            return "".join(text["choices"][0]["message"]["content"] for text in texts)

        yield call
        sync.close()


async def strands_bedrock() -> AsyncIterator[Call]:
    @tool
    def add(x: int, y: int) -> int:
        """Add two numbers."""
        return x + y

    model = BedrockModel(boto_session=boto3.Session(**AWS))

    async def call() -> str:
        agent = Agent(model=model, tools=[add], callback_handler=None)
        return str(await asyncio.to_thread(agent, "what is 1 + 3")).strip()

    yield call


@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
@pytest.mark.parametrize(
    ("client", "calls"),
    [
        (openai_async, 1),
        (openai_responses_sync, 1),
        (anthropic_stream, 1),
        (gemini_sync_and_async, 2),
        (bedrock_converse, 1),
        (bedrock_invoke_stream, 1),
        (requests_and_aiohttp, 2),
        (strands_bedrock, 1),
    ],
)
async def test_clients_made_before_the_rollout_call_its_session(
    client: Callable[[], AsyncIterator[Call]], calls: int, gateway: GatewayClient, session: SessionHandle, route: Route
) -> None:
    made = client()
    call = await anext(made)
    with routed(route):
        text = await call()
    with pytest.raises(StopAsyncIteration):
        await anext(made)
    found = (await gateway.fetch_async([session.session_id]))[session.session_id]
    assert route.calls["_calls"]["gateway"] == calls == len(found.turns)
    assert text
    assert str(found.dialogue[-1]["content"]) in text


def test_the_agents_own_credentials_stay_with_it() -> None:
    """A gateway elsewhere would otherwise get them, over plain HTTP."""
    seen: list[Asked] = []

    def answer(asked: Asked) -> tuple[Any, ...]:
        seen.append(asked)
        return 200, {}

    install()
    headers = {"Authorization": f"Bearer {SECRET}", "X-Api-Key": SECRET, "Cookie": SECRET, "X-Own": "kept"}
    with answering(answer) as url:
        route = Route(base_url=f"{url}/sessions/s/v1", api_key="session-key")

        async def ask() -> None:
            async with aiohttp.ClientSession(headers=headers, auth=None) as client:
                await (await client.post(OPENAI, json={}, params={"beta": "1"})).read()

        class Auth(httpx.Auth):
            def auth_flow(self, request: httpx.Request) -> Any:
                request.headers["authorization"] = SECRET
                yield request

        def hook(request: httpx.Request) -> None:
            request.headers["x-api-key"] = SECRET

        with routed(route):
            with httpx.Client(auth=Auth(), event_hooks={"request": [hook]}) as client:
                client.post(f"{OPENAI}?key={SECRET}", json={}, headers=headers)
            requests.post(OPENAI, json={}, headers=headers, auth=("user", SECRET)).close()
            asyncio.run(ask())
            bedrock = boto3.Session(**AWS, aws_session_token=SECRET).client("bedrock-runtime")
            bedrock.converse(modelId="m", messages=[{"role": "user", "content": [{"text": "hi"}]}])
            bedrock.close()
    assert len(seen) == 4
    for asked in seen:
        shown = json.dumps([asked.path, asked.headers]) + asked.body.decode()
        assert SECRET not in shown
        assert "AKIASECRET" not in shown
        assert asked.headers["authorization"] == "Bearer session-key"
        assert asked.headers["host"] == url.removeprefix("http://")
        assert asked.path.startswith("/sessions/s/v1/")
    assert [a.headers.get("x-own") for a in seen[:3]] == ["kept"] * 3


async def test_other_calls_keep_their_address_and_the_clients_work_as_before_outside_a_rollout() -> None:
    seen: list[Asked] = []

    def answer(asked: Asked) -> tuple[Any, ...]:
        seen.append(asked)
        return 200, {"data": [{"embedding": [0.5], "index": 0}], "object": "list", "choices": []}

    with answering(answer) as own, answering(lambda _: (500, b"")) as other:
        route = Route(base_url=f"{other}/sessions/s/v1", api_key="k", hosts=["127.0.0.1"])
        async with openai.AsyncOpenAI(api_key=SECRET, base_url=f"{own}/v1", max_retries=0) as client:
            await client.chat.completions.create(model="m", messages=USER)
            with routed(route):
                await client.embeddings.create(model="e", input="x", encoding_format="float")
                with pytest.raises(openai.InternalServerError) as refused:
                    await client.chat.completions.create(model="m", messages=USER)
    assert [asked.path for asked in seen] == ["/v1/chat/completions", "/v1/embeddings"]
    assert all(asked.headers["authorization"] == f"Bearer {SECRET}" for asked in seen)
    assert str(refused.value.request.url).startswith(other)  # so that the cause is the gateway's
    assert [*route.elsewhere] == ["127.0.0.1/v1/embeddings (no chat)"]


def with_httpx(proxy: str) -> None:
    with httpx.Client(proxy=proxy, cookies={"sid": SECRET}) as client:
        client.post(OPENAI, json={})
    with httpx.Client(transport=httpx.HTTPTransport(proxy=proxy)) as client:
        client.post(OPENAI, json={}, headers={"Ocp-Apim-Subscription-Key": SECRET})

    async def ask() -> None:
        async with httpx.AsyncClient(proxy=proxy) as client:
            await client.post(OPENAI, json={}, params={"subscription-key": SECRET})

    asyncio.run(ask())


def with_requests(proxy: str) -> None:
    with requests.Session() as client:
        client.proxies = {"http": proxy, "https": proxy}
        client.cookies.set("sid", SECRET)
        client.post(OPENAI, json={}, params={"key": SECRET})
    requests.post(OPENAI, json={}, proxies={"http": proxy, "https": proxy})


def with_aiohttp(proxy: str) -> None:
    async def authorize(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        request.headers["Authorization"] = SECRET
        return await handler(request)

    async def ask() -> None:
        login = aiohttp.BasicAuth("user", SECRET)
        for options in ({"proxy": proxy}, {"auth": login}, {"cookies": {"sid": SECRET}}, {"middlewares": (authorize,)}):
            async with aiohttp.ClientSession(**options) as client:  # type: ignore[arg-type]
                await (await client.post(OPENAI, json={}, params={"key": SECRET}, cookies={"id": SECRET})).read()
        async with aiohttp.ClientSession() as client:
            await (await client.post(OPENAI, json={}, proxy=proxy)).read()

    asyncio.run(ask())


def with_botocore(proxy: str) -> None:
    config = Config(proxies={"http": proxy, "https": proxy}, retries={"total_max_attempts": 1})
    client = boto3.Session(**AWS).client("bedrock-runtime", config=config)
    client.converse(modelId="m", messages=[{"role": "user", "content": [{"text": "hi"}]}])


def with_variables(proxy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "https_proxy"):
            patch.setenv(name, proxy)
        httpx.post(OPENAI, json={})
        requests.post(OPENAI, json={})
        boto3.Session(**AWS).client("bedrock-runtime").converse(
            modelId="m", messages=[{"role": "user", "content": [{"text": "hi"}]}]
        )

        async def ask() -> None:
            async with aiohttp.ClientSession(trust_env=True) as client:
                await (await client.post(OPENAI, json={})).read()

        asyncio.run(ask())


@pytest.mark.filterwarnings("ignore:.*(BasicAuth|'auth'):DeprecationWarning")
@pytest.mark.parametrize(
    ("ask", "calls"),
    [(with_httpx, 3), (with_requests, 2), (with_aiohttp, 5), (with_botocore, 1), (with_variables, 4)],
)
def test_the_gateway_is_reached_without_the_agents_proxies_and_credentials(
    ask: Callable[[str], None], calls: int
) -> None:
    seen: list[Asked] = []
    stolen: list[Asked] = []

    def answer(asked: Asked) -> tuple[Any, ...]:
        seen.append(asked)
        message = {"role": "assistant", "content": [{"text": "hi"}]}
        return 200, {"output": {"message": message}, "stopReason": "end_turn"}

    def steal(asked: Asked) -> tuple[Any, ...]:
        stolen.append(asked)
        return 502, {}

    install()
    with (
        answering(answer) as url,
        answering(steal) as proxy,
        routed(Route(base_url=f"{url}/sessions/s/v1", api_key="session-key")),
    ):
        ask(proxy)
    assert (len(seen), stolen) == (calls, [])
    for asked in seen:
        assert SECRET not in json.dumps([asked.path, asked.headers])
        assert "?" not in asked.path
        assert "cookie" not in asked.headers
        assert asked.headers["authorization"] == "Bearer session-key"

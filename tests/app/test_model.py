"""`app.model()`: the rollout's model, else the bundle's, else the environment's, else the default."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import pickle
import ssl
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import httpx
import openai
import pytest
import strands
from aws_bedrock_token_generator import provide_token

from agentcore_rl_toolkit import AgentCoreRLApp
from agentcore_rl_toolkit.app import Model
from agentcore_rl_toolkit.app import model as models
from agentcore_rl_toolkit.errors import ConfigError
from serving import Asked, answering

ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/shop-5RAgoLKvAy"
BUNDLE = "arn:aws:bedrock-agentcore:us-west-2:123456789012:configuration-bundle/bundle-"
ENDPOINT = "https://runtime.sagemaker.eu-central-1.amazonaws.com/endpoints/shop/openai/v1"
CONFIGURATIONS: dict[str, Any] = {
    "trained-0123456789": {"base_url": "https://trained/v1", "model_id": "trained", "sampling_params": {"top_p": 0.9}},
    "hosted-0123456789": {"model_id": "arn:of:an:imported:model"},
    "prompt-0123456789": {"system_prompt": "Be kind."},
}
AGENT = """
import threading

def seen():
    model = app.model(default="hosted")
    return [model.source, model.base_url, model.model_id, dict(model.sampling_params)]

@app.entrypoint
def answer(payload):
    return seen()

@app.rollout_entrypoint
def rollout(payload):
    if payload.get("in_thread"):
        failed = []
        def ask():
            try:
                seen()
            except Exception as e:
                failed.append(str(e))
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return {"rewards": 0, "failed": failed}
    return {"rewards": 1.0, "seen": seen()}
"""


@pytest.fixture(scope="module")
def control() -> Iterator[str]:
    """AgentCore's control plane, as far as an agent asks it for a bundle's version."""

    def answer(asked: Asked) -> tuple[Any, ...]:
        name = asked.path.split("/")[2].removeprefix("bundle-")
        if name not in CONFIGURATIONS:
            return 403, {"message": "not authorized"}, {"x-amzn-errortype": "AccessDeniedException"}
        found = {"bundleArn": BUNDLE, "bundleId": name, "bundleName": name, "versionId": "v" * 36, "createdAt": 0}
        return 200, {**found, "components": {ARN: {"configuration": CONFIGURATIONS[name]}}}

    with answering(answer) as url:
        yield url


def environment(control: str) -> dict[str, str]:
    return {
        "AGENTCORE_RL_ROLLOUTS": "on",
        "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE_CONTROL": control,
        "OTEL_RESOURCE_ATTRIBUTES": f"cloud.resource_id={ARN}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-west-2",
    }


@pytest.fixture(scope="module")
def agent(start_shared_agent: Any, control: str) -> Any:
    return start_shared_agent(AGENT, env=environment(control))


def asked(agent: Any, bundle: str | None = None) -> Any:
    """The model of a production call, with a bundle in its baggage."""
    version = "0123abcd-0123-0123-0123-0123456789ab"
    values = {"aws.agentcore.configbundle_arn": f"{BUNDLE}{bundle}", "aws.agentcore.configbundle_version": version}
    baggage = ",".join(f"{name}={quote(value)}" for name, value in values.items())
    return agent.invoke({"prompt": "hi"}, headers={"baggage": baggage} if bundle else {})


def test_the_first_source_that_exists_is_taken(agent: Any, start_agent: Any, control: str) -> None:
    trained = ["bundle", "https://trained/v1", "trained", {"top_p": 0.9}]
    assert asked(agent) == (200, ["default", None, "hosted", {}])
    assert asked(agent, "trained-0123456789") == (200, trained)
    assert asked(agent, "hosted-0123456789") == (200, ["bundle", None, "arn:of:an:imported:model", {}])
    assert asked(agent, "prompt-0123456789") == (200, ["default", None, "hosted", {}])
    rollout = {"base_url": "http://gateway/v1", "model_id": "policy", "sampling_params": {"temperature": 0.5}}
    assert agent.run(**rollout)["seen"] == ["rollout", "http://gateway/v1", "policy", {"temperature": 0.5}]
    rollout_of_its_own_model = agent.run(model_id="asked", sampling_params={"temperature": 0})
    assert rollout_of_its_own_model["seen"] == ["default", None, "asked", {"temperature": 0}]
    assert asked(agent) == (200, ["default", None, "hosted", {}])

    named = {"AGENTCORE_RL_MODEL_URL": "http://mine/v1", "AGENTCORE_RL_MODEL_ID": "mine"}
    other = start_agent(AGENT, env={**environment(control), **named})
    assert asked(other) == (200, ["environment", "http://mine/v1", "mine", {}])
    assert asked(other, "prompt-0123456789") == (200, ["environment", "http://mine/v1", "mine", {}])
    assert asked(other, "trained-0123456789") == (200, trained)
    assert other.run(**rollout)["seen"][0] == "rollout"
    assert other.run(model_id="asked")["seen"] == ["environment", "http://mine/v1", "asked", {}]


def test_a_bundle_that_cannot_be_read_is_an_error_and_not_another_model(agent: Any) -> None:
    status, reply = asked(agent, "forbidden-0123456789")
    assert (status, "GetConfigurationBundleVersion" in reply["error"]) == (500, True)


def test_a_thread_that_does_not_know_its_rollout_gets_no_other_model(agent: Any) -> None:
    [failed] = agent.run({"in_thread": True}, base_url="http://gateway/v1")["failed"]
    assert "without the context of its call" in failed


# -- what a model makes


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> AgentCoreRLApp:
    for name, value in environment("").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_BEARER_TOKEN_BEDROCK", raising=False)
    models._aws.cache_clear()  # it has the credentials of the process
    return AgentCoreRLApp()


def test_a_model_that_nothing_names_is_an_error(app: AgentCoreRLApp) -> None:
    for default in (None, "", {}):
        with pytest.raises(ConfigError, match="AGENTCORE_RL_MODEL_URL"):
            app.model(default=default)
    with pytest.raises(ConfigError, match="http://"):
        app.model(default={"base_url": "models.example/v1"})


def signed(token: str) -> tuple[str, str, dict[str, list[str]]]:
    prefix, _, text = token.rpartition("-")
    url = urlsplit("https://" + base64.b64decode(text).decode())
    return prefix, url.netloc, parse_qs(url.query)


def test_a_sagemaker_endpoint_gets_a_fresh_bearer_token(app: AgentCoreRLApp) -> None:
    model = app.model(default={"base_url": ENDPOINT})
    first = model.openai_kwargs()
    prefix, host, query = signed(first["api_key"])
    assert (prefix, host, first["base_url"], model.model_id) == (
        "sagemaker-api-key",
        "sagemaker.amazonaws.com",
        ENDPOINT,
        "",
    )
    assert (query["Action"], query["X-Amz-Expires"], query["Version"]) == (["CallWithBearerToken"], ["43200"], ["1"])
    assert "/eu-central-1/sagemaker/aws4_request" in query["X-Amz-Credential"][0]
    deadline = time.monotonic() + 30
    while model.api_key == first["api_key"]:  # a token has the second it was signed in
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert openai.OpenAI(**model.openai_kwargs()).base_url == f"{ENDPOINT}/"


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("https://models.example/v1", "none"),
        (ENDPOINT.replace("https", "http"), "none"),  # a token goes over TLS only
        (ENDPOINT.replace(".com", ".com.evil.example"), "none"),
        ("https://runtime.sagemaker.eu-central-1.amazonaws.com@evil.example/v1", "none"),
    ],
)
def test_no_other_address_gets_a_token(app: AgentCoreRLApp, url: str, key: str) -> None:
    assert app.model(default={"base_url": url}).api_key == key
    assert app.model(default={"base_url": url, "api_key": "mine"}).api_key == "mine"
    assert "mine" not in repr(app.model(default={"base_url": url, "api_key": "mine"}))


def test_a_hosted_model_is_reached_by_every_client(app: AgentCoreRLApp, monkeypatch: pytest.MonkeyPatch) -> None:
    model = app.model(default="openai.gpt-oss-120b-1:0")
    address = "https://bedrock-runtime.us-west-2.amazonaws.com/openai/v1"
    for _ in range(100):  # both in the same second
        theirs, ours = provide_token(region="us-west-2"), model.openai_kwargs()
        if signed(theirs)[2]["X-Amz-Date"] == signed(ours["api_key"])[2]["X-Amz-Date"]:
            break
    assert ours == {"base_url": address, "api_key": theirs}
    made = model.strands_model(max_tokens=64)
    assert (type(made).__name__, made.get_config()["max_tokens"]) == ("BedrockModel", 64)
    assert made.get_config()["model_id"] == model.model_id
    assert model.bedrock_client().meta.service_model.service_name == "bedrock-runtime"
    monkeypatch.setenv("AWS_BEARER_TOKEN_BEDROCK", "bedrock-key")
    assert model.api_key == "bedrock-key"


def test_a_model_at_an_address_is_openais_for_strands_and_none_for_bedrock(app: AgentCoreRLApp) -> None:
    model = app.model(default={"base_url": "http://gateway/v1", "model_id": "m", "sampling_params": {"top_k": 5}})
    made = model.strands_model(max_tokens=64)
    config = {name: made.get_config()[name] for name in ("model_id", "params")}
    assert config == {"model_id": "m", "params": {"max_tokens": 64, "extra_body": {"top_k": 5}}}
    client = made.client_args["http_client"]
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert copied.client_args == {"base_url": "http://gateway/v1", "api_key": "none", "http_client": client}
    with pytest.raises(ConfigError, match="openai_kwargs"):
        model.bedrock_client()


def test_calls_of_strands_share_certificates_and_no_connection(
    app: AgentCoreRLApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Asked] = []
    read: list[Any] = []
    load = ssl.SSLContext.load_verify_locations
    # Not the context that all tests share: each client without one reads the certificates.
    monkeypatch.setattr("httpx._transports.default.create_ssl_context", httpx.create_ssl_context)
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *given: (read.append(given), load(*given))[1])
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    choice = {"index": 0, "delta": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}

    def answer(asked: Asked) -> tuple[Any, ...]:
        seen.append(asked)
        return 200, f"data: {json.dumps({**chunk, 'choices': [choice]})}\n\ndata: [DONE]\n\n".encode()

    with answering(answer) as url:
        for key in ("one", "two"):
            model = app.model(default={"base_url": f"{url}/v1", "model_id": "m", "api_key": key})
            agent = strands.Agent(model.strands_model(), callback_handler=None)
            for _ in range(2):
                assert str(agent("hello")).strip() == "hi"
    assert [asked.headers["authorization"] for asked in seen] == ["Bearer one"] * 2 + ["Bearer two"] * 2
    assert len(read) <= 1


async def model_of_a_rollout(app: AgentCoreRLApp, **block: Any) -> Model:
    found: asyncio.Future[Model] = asyncio.get_running_loop().create_future()

    def run(payload: Any) -> Any:
        found.get_loop().call_soon_threadsafe(found.set_result, app.model(default="hosted"))

    app.rollout_entrypoint(run)
    await app.handlers["main"]({"_rollout": block}, None)
    return await asyncio.wait_for(found, 20)


async def test_a_rollouts_bedrock_client_calls_the_gateway_with_the_key_and_no_token_of_the_role(
    app: AgentCoreRLApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_BEARER_TOKEN_BEDROCK", "bedrock-key")
    for url in (ENDPOINT, "https://bedrock-runtime.us-west-2.amazonaws.com/openai/v1"):
        model = await model_of_a_rollout(app, base_url=url)
        assert (model.source, model.api_key) == ("rollout", "none")
    seen: list[Any] = []

    def answer(asked: Asked) -> tuple[Any, ...]:
        seen.append(asked)
        return 200, {"output": {"message": {"role": "assistant", "content": [{"text": "hi"}]}}}

    with answering(answer) as url:
        model = await model_of_a_rollout(app, base_url=f"{url}/sessions/a/v1", api_key="sk-1", model_id="m")
        assert model.bedrock_client().meta.region_name == "us-west-2"
        monkeypatch.delenv("AWS_REGION")
        assert model.bedrock_client().meta.region_name == "us-east-1"
        messages = [{"role": "user", "content": [{"text": "hi"}]}]
        reply = await asyncio.to_thread(model.bedrock_client().converse, modelId=model.model_id, messages=messages)
    assert reply["output"]["message"]["content"] == [{"text": "hi"}]
    assert [asked.path for asked in seen] == ["/sessions/a/v1/bedrock/model/m/converse"]
    assert seen[0].headers["authorization"] == "Bearer sk-1"
    assert (await model_of_a_rollout(app, base_url=ENDPOINT, api_key="given")).api_key == "given"

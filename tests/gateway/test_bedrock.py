"""Bedrock's Converse and InvokeModel APIs through the gateway, with AWS's, Strands' and Anthropic's own clients."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import AnthropicBedrock
from botocore.config import Config
from botocore.eventstream import EventStreamBuffer
from botocore.exceptions import ClientError, EventStreamError
from strands import Agent, tool
from strands.models.bedrock import BedrockModel
from strands.types.exceptions import ContextWindowOverflowException

from agentcore_rl_toolkit.gateway import GatewayClient, Limits, SessionHandle
from agentcore_rl_toolkit.gateway.testing import encode_messages
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.trajectory import build_trajectory
from scripted_engine import Fault, ScriptedEngine

from .asking import MODEL, Start, boto, captured, opened

ARN = "arn:aws:bedrock:us-west-2:123456789012:application-inference-profile/abc123"
USER = [{"role": "user", "content": [{"text": "what is 1 + 3"}]}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}}
TOOLS = {"tools": [{"toolSpec": {"name": "add", "description": "Add.", "inputSchema": {"json": SCHEMA}}}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1, "y": 3}'}}
ROLE = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-west-2"}


def address(session: SessionHandle) -> str:
    """The address for clients that sign their requests."""
    return f"{session.base_url}/bedrock/{session.api_key}"


@tool
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


@pytest.fixture
def aws(session: SessionHandle, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make boto3's client of a session as agents do."""

    def make(of: SessionHandle = session, **config: Any) -> Any:
        for name, value in ROLE.items():
            monkeypatch.setenv(name, value)
        options = Config(**{"retries": {"total_max_attempts": 1}, **config})
        return boto().client("bedrock-runtime", region_name="us-west-2", endpoint_url=address(of), config=options)

    return make


async def whole(client: Any, *, stream: bool, **asked: Any) -> dict[str, Any]:
    """The message, stop reason and usage of a reply."""
    asked = {"modelId": ARN, **asked}
    if not stream:
        reply = await asyncio.to_thread(client.converse, **asked)
        return {"content": reply["output"]["message"]["content"], **reply}
    return await asyncio.to_thread(lambda: joined(list(client.converse_stream(**asked)["stream"])))


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream as the reply that it makes."""
    content: dict[int, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for event in events:
        [(kind, value)] = event.items()
        if kind == "contentBlockStart":
            content[value["contentBlockIndex"]] = {"toolUse": {**value["start"]["toolUse"], "input": ""}}
        elif kind == "contentBlockDelta":
            [(what, piece)] = value["delta"].items()
            block = content.setdefault(value["contentBlockIndex"], {})
            if what == "text":
                block["text"] = block.get("text", "") + piece
            elif what == "toolUse":
                block["toolUse"]["input"] += piece["input"]
            else:
                thought = block.setdefault("reasoningContent", {"reasoningText": {"text": ""}})["reasoningText"]
                thought |= {name: thought.get(name, "") + text for name, text in piece.items()}
        elif kind in ("messageStop", "metadata"):
            found |= value
    for block in content.values():
        if "toolUse" in block:
            block["toolUse"]["input"] = json.loads(block["toolUse"]["input"])
    return {"content": [content[i] for i in sorted(content)], **found}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_its_result_comes_back(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, aws: Callable[..., Any], stream: bool
) -> None:
    engine.replies += [{"content": None, "reasoning_content": "hmm", "tool_calls": [CALL]}, {"content": "w2 w3"}]
    bedrock = aws()
    system = [{"text": "be brief"}, {"cachePoint": {"type": "default"}}]
    inference = {"maxTokens": 50, "temperature": 0.5, "topP": 0.9, "stopSequences": ["zz"]}
    asked: dict[str, Any] = {"system": system, "toolConfig": TOOLS, "inferenceConfig": inference}
    fields = {"top_k": 4, "thinking": {"type": "enabled", "budget_tokens": 9}}
    first = await whole(bedrock, stream=stream, messages=USER, **asked, additionalModelRequestFields=fields)
    use = {"toolUseId": "call_1", "name": "add", "input": {"x": 1, "y": 3}}
    assert [next(iter(block)) for block in first["content"]] == ["reasoningContent", "toolUse"]
    assert first["content"][0]["reasoningContent"]["reasoningText"]["text"] == "hmm"
    assert first["content"][0]["reasoningContent"]["reasoningText"]["signature"]
    assert (first["content"][1]["toolUse"], first["stopReason"]) == (use, "tool_use")
    usage, metrics = first["usage"], first["metrics"]
    assert usage["totalTokens"] == usage["inputTokens"] + usage["outputTokens"] + usage["cacheReadInputTokens"] > 0
    assert 0 <= metrics["latencyMs"] < 60_000
    body = engine.calls[0].body
    assert (body["model"], body["max_tokens"], body["stop"], body["top_k"]) == (ARN, 50, ["zz"], 4)
    assert body["tools"][0]["function"] == {"name": "add", "description": "Add.", "parameters": SCHEMA}

    result = {"toolUseId": "call_1", "content": [{"json": {"sum": 4}}, {"text": "done"}], "status": "success"}
    history = [
        *USER,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [{"toolResult": result}, {"cachePoint": {"type": "default"}}]},
    ]
    second = await whole(bedrock, stream=stream, messages=history, **asked)
    assert (second["content"], second["stopReason"]) == ([{"text": "w2 w3"}], "end_turn")
    sent = engine.calls[1].body["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool"]
    assert (sent[2]["reasoning_content"], sent[2]["tool_calls"]) == ("hmm", [CALL])
    assert sent[3] == {"role": "tool", "tool_call_id": "call_1", "content": '{"sum": 4}\ndone'}
    capture = await captured(client, session)
    assert [t.completion_ids for t in capture.turns] == [ids for seen in engine.calls for ids in seen.completion_ids]
    assert capture.errors == []
    assert len(build_trajectory(session.session_id, capture.turns).sequences) == 1


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_strands_agent_in_token_mode_makes_one_sequence(
    engine: ScriptedEngine, start_gateway: Start, aws: Callable[..., Any], streaming: bool
) -> None:
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    session = await opened(gateway)
    renderer = Renderer.from_path(MODEL)
    stop = min(renderer.stop_token_ids)
    sampled = ['<tool_call>\n{"name": "add",  "arguments": {"x": 1, "y":3}}\n</tool_call>', "It is 4.", "Yes."]
    engine.replies += [{"token_ids": [*renderer.encode(text), stop]} for text in sampled]
    aws(session)  # its environment
    model = BedrockModel(endpoint_url=address(session), region_name="us-west-2", model_id="m", streaming=streaming)
    agent = Agent(model=model, tools=[add], system_prompt="be brief", callback_handler=None)
    assert str(await asyncio.wait_for(agent.invoke_async("what is 1 + 3"), 60)).strip() == "It is 4."
    assert str(await asyncio.wait_for(agent.invoke_async("sure?"), 60)).strip() == "Yes."
    assert renderer.decode(engine.calls[1].prompt_ids).count("4") > 0
    capture = await captured(gateway, session)
    assert [t.completion_ids for t in capture.turns] == [ids for seen in engine.calls for ids in seen.completion_ids]
    [sequence] = build_trajectory(session.session_id, capture.turns).sequences
    assert sum(sequence.loss_mask) == sum(len(turn.completion_ids) for turn in capture.turns)


async def test_a_prompt_that_is_too_long_is_one_to_strands(
    engine: ScriptedEngine, session: SessionHandle, aws: Callable[..., Any]
) -> None:
    aws()
    body = b'{"error": {"message": "This model\'s maximum context length is 8 tokens.", "code": 400}}'
    engine.faults.append(Fault(status=400, body=body))
    model = BedrockModel(endpoint_url=address(session), region_name="us-west-2", model_id="m")
    with pytest.raises(ContextWindowOverflowException):
        async for _ in model.stream([{"role": "user", "content": [{"text": "hi"}]}]):
            pass


async def test_parts_that_the_model_does_not_get_are_counted(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, aws: Callable[..., Any]
) -> None:
    document = {"format": "pdf", "name": "bill", "source": {"bytes": b"%PDF"}}
    note = {"format": "txt", "name": "note", "source": {"bytes": b"buy milk"}}
    image = {"format": "png", "source": {"bytes": b"\x89PNG"}}
    blocks = [{"text": "see"}, {"document": document}, {"document": note}, {"image": image}]
    history = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [{"toolUse": {"toolUseId": "1", "name": "add", "input": {}}}]},
        {"role": "user", "content": [{"toolResult": {"toolUseId": "1", "content": [], "status": "error"}}]},
    ]
    await asyncio.to_thread(
        aws().converse,
        modelId="m",
        messages=history,
        guardrailConfig={"guardrailIdentifier": "g", "guardrailVersion": "1"},
        performanceConfig={"latency": "optimized"},
        requestMetadata={"a": "b"},
    )
    sent = engine.calls[0].body["messages"]
    assert sent[0]["content"].splitlines() == [
        *("see", "bill", "[document (pdf): the model reads text only; extract the text with another tool]"),
        *("note", "buy milk", "[image: the model reads text only]"),
    ]
    assert sent[2]["content"] == "The tool failed and said nothing."
    [turn] = (await captured(client, session)).turns
    assert turn.left_out == {"guardrailConfig": 1, "performanceConfig": 1, "document": 1, "image": 1}


async def test_a_schema_reaches_the_engine(engine: ScriptedEngine, aws: Callable[..., Any]) -> None:
    shape = {"jsonSchema": {"name": "sum", "schema": json.dumps(SCHEMA)}}
    output = {"textFormat": {"type": "json_schema", "structure": shape}}
    await whole(aws(), stream=False, messages=USER, outputConfig=output)
    asked = engine.calls[0].body["response_format"]["json_schema"]
    assert (asked["name"], asked["schema"]) == ("sum", SCHEMA)


async def test_errors_are_aws_errors(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, aws: Callable[..., Any]
) -> None:
    [spent] = await client.create_sessions_async(["spent"], max_turns=1)
    stranger = type(session)(session_id=session.session_id, base_url=session.base_url, api_key="wrong")

    async def refused(of: SessionHandle = session, **asked: Any) -> tuple[int, str, str]:
        with pytest.raises(ClientError) as caught:
            await asyncio.to_thread(aws(of).converse, **{"modelId": ARN, "messages": USER, **asked})
        reply = caught.value.response
        return reply["ResponseMetadata"]["HTTPStatusCode"], reply["Error"]["Code"], reply["Error"]["Message"]

    assert (await refused(stranger))[:2] == (403, "AccessDeniedException")
    status, code, why = await refused(inferenceConfig={"temperature": 7})
    assert (status, code, "temperature" in why) == (400, "ValidationException", True)
    await asyncio.to_thread(aws(spent).converse, modelId=ARN, messages=USER)
    assert (await refused(spent))[:2] == (403, "AccessDeniedException")
    for kind, status, code in (
        (Fault(status=429), 429, "ThrottlingException"),
        (Fault(status=503), 503, "ServiceUnavailableException"),
        (Fault(status=504), 408, "ModelTimeoutException"),
        (Fault(status=500), 500, "InternalServerException"),
    ):
        engine.faults.append(kind)
        assert (await refused())[:2] == (status, code)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}) as agent:
        reply = await agent.post(f"{address(session)}/model/m/converse-stream", content=b"[]")
        missing = await agent.post(f"{address(session)}/model/m/async-invoke", json={})
    assert (reply.status_code, reply.headers["x-amzn-errortype"]) == (400, "ValidationException")
    assert (missing.status_code, missing.headers["x-amzn-errortype"]) == (404, "ResourceNotFoundException")


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("mode", ["legacy", "standard"])
async def test_botocore_asks_again(
    engine: ScriptedEngine,
    client: GatewayClient,
    session: SessionHandle,
    aws: Callable[..., Any],
    status: int,
    mode: str,
) -> None:
    engine.faults.append(Fault(status=status))
    bedrock = aws(retries={"total_max_attempts": 2, "mode": mode})
    reply = await whole(bedrock, stream=False, messages=USER)
    assert reply["ResponseMetadata"]["RetryAttempts"] == 1
    capture = await captured(client, session)
    assert (len(engine.calls), len(capture.turns)) == (2, 1)


async def test_the_key_is_that_of_the_session(session: SessionHandle) -> None:
    """It is in the path, a bearer token, or the access key id of a signature."""
    signed = "AWS4-HMAC-SHA256 Credential={}/20261129/us-west-2/bedrock/aws4_request, SignedHeaders=host, Signature=0"
    base = session.base_url.removesuffix("/v1")
    async with httpx.AsyncClient() as agent:
        for key, expected in ((session.api_key, 200), ("sk-wrong", 403)):
            for url, header in (
                (f"{base}/bedrock/{key}", signed.format("AKIA")),
                (f"{base}/bedrock", f"Bearer {key}"),
                (f"{base}/v1/tag/tester/bedrock", signed.format(key)),
            ):
                headers = {"authorization": header}
                reply = await agent.post(f"{url}/model/m/converse", json={"messages": USER}, headers=headers)
                assert reply.status_code == expected, (url, header, reply.text)


async def test_attempts_of_one_call_are_one_turn(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    headers = {"authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(headers=headers) as agent:
        texts = []
        for invocation in ("a", "a", "b"):
            reply = await agent.post(
                f"{address(session)}/model/m/converse",
                json={"messages": USER},
                headers={"amz-sdk-invocation-id": invocation},
            )
            texts.append(reply.json()["output"])
    assert texts[0] == texts[1]
    assert len((await captured(client, session)).turns) == len(engine.calls) == 2


def broken(chunk: dict[str, Any]) -> dict[str, Any]:
    message = {"error": {"message": "out of memory", "type": "X", "code": 500}}
    return message if any("w" in (c["delta"].get("content") or "") for c in chunk["choices"]) else chunk


async def test_a_stream_that_breaks_is_an_error_of_the_stream(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, aws: Callable[..., Any]
) -> None:
    engine.faults.append(Fault(edit=broken))
    with pytest.raises(EventStreamError, match="out of memory"):
        await whole(aws(), stream=True, messages=USER)
    capture = await captured(client, session)
    assert (capture.turns, [e["status"] for e in capture.errors]) == ([], ["partial"])


async def test_a_stream_is_decoded_at_every_chunk_size_and_pings_are_passed_over(
    engine: ScriptedEngine, start_gateway: Start, aws: Callable[..., Any]
) -> None:
    gateway = await start_gateway(engine, limits=Limits(connect_s=60, keep_alive_s=0.02))
    session = await opened(gateway)
    engine.replies += [{"content": "w1 w2 w3"}] * 2
    engine.token_s = 0.1
    reply = await whole(aws(session), stream=True, messages=USER, toolConfig=TOOLS)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}) as agent:
        raw = await agent.post(
            f"{address(session)}/model/{ARN.replace('/', '%2F')}/converse-stream",
            json={"messages": USER, "toolConfig": TOOLS},
        )
    assert raw.headers["content-type"] == "application/vnd.amazon.eventstream"
    seen = []
    for size in (1, 7, len(raw.content)):
        buffer = EventStreamBuffer()
        events = []
        for at in range(0, len(raw.content), size):
            buffer.add_data(raw.content[at : at + size])
            events += [{m.headers[":event-type"]: json.loads(m.payload)} for m in buffer]
        assert {"ping": {}} in events
        events = [event for event in events if "ping" not in event]
        assert [next(iter(event)) for event in events][-2:] == ["messageStop", "metadata"]
        seen.append(joined(events))
    assert [s["content"] for s in seen] == [reply["content"]] * 3


async def test_tokens_are_counted(client: GatewayClient, session: SessionHandle, aws: Callable[..., Any]) -> None:
    bedrock = aws()
    expected = len(encode_messages([{"role": "user", "content": "what is 1 + 3"}]))
    counted = await asyncio.to_thread(bedrock.count_tokens, modelId="m", input={"converse": {"messages": USER}})
    assert counted["inputTokens"] == expected
    said = {"converse": {"messages": [*USER, {"role": "assistant", "content": [{"text": "4"}]}]}}
    assert (await asyncio.to_thread(bedrock.count_tokens, modelId="m", input=said))["inputTokens"] > expected
    body = {"anthropic_version": "bedrock-2023-05-31", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    inner = {"invokeModel": {"body": json.dumps(body).encode()}}
    assert (await asyncio.to_thread(bedrock.count_tokens, modelId="m", input=inner))["inputTokens"] > 0
    assert (await captured(client, session)).turns == []


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_client_for_bedrock(
    engine: ScriptedEngine,
    client: GatewayClient,
    session: SessionHandle,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANTHROPIC_BEDROCK_BASE_URL", session.base_url + "/bedrock")
    monkeypatch.setenv("AWS_BEARER_TOKEN_BEDROCK", session.api_key)
    engine.replies.append({"content": None, "reasoning_content": "hmm", "tool_calls": [CALL]})
    tools: Any = [{"name": "add", "input_schema": SCHEMA}]
    asked: Any = {"model": ARN, "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    asked["thinking"] = {"type": "adaptive"}

    def ask() -> Any:
        with AnthropicBedrock(aws_region="us-west-2", max_retries=0) as llm:
            if not stream:
                return llm.messages.create(**asked)
            with llm.messages.stream(**asked) as events:
                return events.get_final_message()

    reply = await asyncio.to_thread(ask)
    assert [block.type for block in reply.content] == ["thinking", "tool_use"]
    assert reply.content[1].input == {"x": 1, "y": 3}
    assert (reply.stop_reason, engine.calls[0].body["model"]) == ("tool_use", ARN)
    capture = await captured(client, session)
    assert [t.completion_ids for t in capture.turns] == engine.calls[0].completion_ids


async def test_invoke_model_of_boto3(engine: ScriptedEngine, aws: Callable[..., Any]) -> None:
    engine.replies += [{"content": "w1"}] * 2
    bedrock = aws()
    body = {"anthropic_version": "bedrock-2023-05-31", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    asked = {"modelId": "m", "body": json.dumps(body)}
    reply = await asyncio.to_thread(lambda: json.load(bedrock.invoke_model(**asked)["body"]))
    assert reply["content"] == [{"type": "text", "text": "w1"}]
    events = await asyncio.to_thread(lambda: list(bedrock.invoke_model_with_response_stream(**asked)["body"]))
    kinds = [json.loads(event["chunk"]["bytes"])["type"] for event in events]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    with pytest.raises(ClientError, match="anthropic_version"):
        await asyncio.to_thread(bedrock.invoke_model, modelId="m", body=b'{"prompt": "hi"}')


async def test_invoke_model_with_openais_chat(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, aws: Callable[..., Any]
) -> None:
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 20, "tools": [tool]}
    bedrock, asked = aws(), {"modelId": "openai.gpt-oss-120b-1:0", "body": json.dumps(body)}
    engine.replies += [{"content": "w1", "reasoning_content": "hmm", "tool_calls": [CALL]}] * 2 + [{"content": "w2"}]
    reply = await asyncio.to_thread(lambda: json.load(bedrock.invoke_model(**asked)["body"]))
    [choice] = reply["choices"]
    assert (reply["object"], choice["finish_reason"], choice["message"]["tool_calls"]) == (
        *("chat.completion", "tool_calls"),
        [CALL],
    )
    chunks = [
        json.loads(event["chunk"]["bytes"])
        for event in await asyncio.to_thread(lambda: list(bedrock.invoke_model_with_response_stream(**asked)["body"]))
    ]
    deltas = [piece["delta"] for chunk in chunks for piece in chunk["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hmm"
    assert [c["function"]["name"] for delta in deltas for c in delta.get("tool_calls", ()) if "id" in c] == ["add"]
    assert chunks[-1]["usage"]["completion_tokens"] == reply["usage"]["completion_tokens"] > 0
    assert engine.calls[0].body["model"] == "openai.gpt-oss-120b-1:0"
    engine.faults.append(Fault(status=429))
    with pytest.raises(ClientError, match="ThrottlingException"):
        await asyncio.to_thread(bedrock.invoke_model, **asked)
    capture = await captured(client, session)
    assert [t.completion_ids for t in capture.turns] == [ids for s in engine.calls for ids in s.completion_ids]


async def test_an_agent_that_only_the_environment_leads_to_the_gateway(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    engine.replies += [{"content": None, "tool_calls": [CALL]}, {"content": "w5"}]
    environment = {**os.environ, **ROLE, "AWS_ENDPOINT_URL_BEDROCK_RUNTIME": address(session)}
    program = str(Path(__file__).with_name("bedrock_agent.py"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, stdout=asyncio.subprocess.PIPE, env=environment
    )
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    assert json.loads(said.splitlines()[-1]) == "w5"
    capture = await captured(client, session)
    assert [t.completion_ids for t in capture.turns] == [ids for seen in engine.calls for ids in seen.completion_ids]
    assert len(capture.turns) == 2

"""Google's own client, unmodified, against a running gateway: relay mode and token mode, whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, Limits, SessionHandle
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.trajectory import build_trajectory
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, TLS, Start, captured, opened

genai = pytest.importorskip("google.genai")
types, errors = genai.types, genai.errors
# The client subclasses aiohttp's session, and leaves it open.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning"),
]

ADD = types.FunctionDeclaration(
    name="add",
    description="Adds.",
    parameters=types.Schema(
        type="OBJECT",
        properties={"x": types.Schema(type="INTEGER"), "y": types.Schema(type="INTEGER", nullable=True)},
        required=["x"],
    ),
)
TOOLS = [types.Tool(function_declarations=[ADD])]
THOUGHTS = types.ThinkingConfig(include_thoughts=True)
CALLS = [
    {"id": f"call_{i}", "type": "function", "function": {"name": "add", "arguments": f'{{"x": {i}, "y": 3}}'}}
    for i in (1, 2)
]


OPEN: list[Any] = []  # clients: one that is collected later closes its connections on another event loop


def google(session: SessionHandle, *, v1: bool = False) -> Any:
    """Google's client. It puts its own version behind the base URL, with or without the gateway's /v1."""
    url = session.base_url if v1 else session.base_url.removesuffix("/v1")
    version = None if v1 else "v1beta"
    return client_of(session.api_key, base_url=url, api_version=version)


def client_of(key: str, **options: Any) -> Any:
    options |= {"client_args": TLS, "async_client_args": TLS}
    OPEN.append(genai.Client(api_key=key, http_options=types.HttpOptions(**options)))
    return OPEN[-1]


async def close_all() -> None:
    while OPEN:
        await OPEN.pop().aio.aclose()


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    yield
    await close_all()


async def reply_of(client: Any, contents: Any, *, stream: bool, **config: Any) -> Any:
    """The parts, the finish reason, and the last response of a reply."""
    asked = {"model": "m", "contents": contents, "config": types.GenerateContentConfig(**config)}
    if not stream:
        chunks = [await client.aio.models.generate_content(**asked)]
    else:
        chunks = [chunk async for chunk in await client.aio.models.generate_content_stream(**asked)]
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts if part != types.Part(text="")]
    return parts, chunks[-1]


@pytest.mark.parametrize("v1", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_and_its_result_are_one_sequence_in_relay_mode(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, stream: bool, v1: bool
) -> None:
    llm = google(session, v1=v1)
    engine.replies.append({"content": None, "tool_calls": CALLS, "reasoning_content": "two sums"})
    engine.replies.append({"content": "w5 w9"})
    contents: Any = [types.Content(role="user", parts=[types.Part(text="add"), types.Part(text="please")])]
    config: Any = {"tools": TOOLS, "system_instruction": "Be brief.", "thinking_config": THOUGHTS}
    parts, last = await reply_of(llm, contents, stream=stream, **config)
    calls = [part.function_call for part in parts if part.function_call]
    assert [(c.id, c.name, c.args) for c in calls] == [
        ("call_1", "add", {"x": 1, "y": 3}),
        ("call_2", "add", {"x": 2, "y": 3}),
    ]
    assert "".join(part.text for part in parts if part.thought) == "two sums"
    usage = last.usage_metadata
    assert (last.candidates[0].finish_reason, last.model_version) == (types.FinishReason.STOP, "m")
    assert usage.prompt_token_count == len(engine.calls[0].prompt_ids)
    assert usage.candidates_token_count == len(engine.calls[0].completion_ids[0])
    results = [
        types.Part(function_response=types.FunctionResponse(id=call.id, name=call.name, response={"result": "5"}))
        for call in reversed(calls)
    ]
    # The client's chats keep every event of a stream as a content of its own.
    contents += [types.Content(role="model", parts=[part]) for part in parts]
    contents += [types.Content(role="user", parts=results)]
    parts, _ = await reply_of(llm, contents, stream=stream, **config)
    assert "".join(part.text for part in parts) == "w5 w9"
    assert len(parts) > 1 or not stream

    messages = engine.calls[1].body["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "tool"]
    assert (messages[0]["content"], messages[1]["content"]) == ("Be brief.", "add\nplease")
    thought = {"reasoning_content": "two sums", "reasoning": "two sums"}
    assert messages[2] == {"role": "assistant", "content": "", **thought, "tool_calls": CALLS}
    assert [(m["tool_call_id"], m["content"]) for m in messages[3:]] == [("call_1", "5"), ("call_2", "5")]
    function = engine.calls[0].body["tools"][0]["function"]
    assert function["parameters"] == {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": ["integer", "null"]}},
        "required": ["x"],
    }
    capture = await captured(client, session)
    assert capture.errors == []
    assert [t.completion_ids for t in capture.turns] == [seen.completion_ids[0] for seen in engine.calls]
    assert [t.parse_status for t in capture.turns] == ["parsed", "none"]
    assert len(build_trajectory(session.session_id, capture.turns).sequences) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("faithful", [True, False])
async def test_a_conversation_in_token_mode_has_the_sampled_ids(
    engine: ScriptedEngine, start_gateway: Start, stream: bool, faithful: bool
) -> None:
    """Also for a client that leaves out the ids of calls and does not ask for the thoughts."""
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    session = await opened(gateway)
    llm, renderer = google(session), Renderer.from_path(MODEL)
    stop = min(renderer.stop_token_ids)
    call = '<think>\nOne sum.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": 2}}\n</tool_call>'
    for text in (call, "It is 3."):
        engine.replies.append({"token_ids": [*renderer.encode(text), stop]})
    contents: Any = [types.Content(role="user", parts=[types.Part(text="1 + 2?")])]
    asked: Any = {"tools": TOOLS, "thinking_config": THOUGHTS if faithful else None}
    parts, last = await reply_of(llm, contents, stream=stream, **asked)
    made = next(part.function_call for part in parts if part.function_call)
    assert (made.name, made.args) == ("add", {"x": 1, "y": 2})
    assert last.usage_metadata.prompt_token_count == len(engine.calls[0].prompt_ids)
    assert "".join(part.text for part in parts if part.thought).strip() == ("One sum." if faithful else "")
    if not faithful:
        made.id = None
    result = types.FunctionResponse(id=made.id, name="add", response={"sum": 3})
    contents += [
        types.Content(role="model", parts=parts),
        types.Content(role="user", parts=[types.Part(function_response=result)]),
    ]
    parts, _ = await reply_of(llm, contents, stream=stream, **asked)
    assert "".join(part.text or "" for part in parts) == "It is 3."
    first, second = engine.calls
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert '{"sum": 3}' in renderer.decode(second.prompt_ids)
    capture = await captured(gateway, session)
    assert [t.completion_ids for t in capture.turns] == [seen.completion_ids[0] for seen in engine.calls]
    trajectory = build_trajectory(session.session_id, capture.turns)
    assert len(trajectory.sequences) == 1
    assert trajectory.report.trained_token_share == 1.0


async def test_the_clients_own_tool_loop_and_chats(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    def add(x: int, y: int) -> int:
        """Adds.

        Args:
            x: The first number.
            y: The second number.
        """
        return x + y

    engine.replies.extend([{"content": None, "tool_calls": CALLS}, {"content": "w5 w9"}, {"content": "w2"}])

    def talk() -> list[str]:
        llm = google(session)  # it closes its connections when it is collected
        chat = llm.chats.create(model="m", config=types.GenerateContentConfig(tools=[add]))
        texts = [chat.send_message("add").text]
        texts.append("".join(chunk.text or "" for chunk in chat.send_message_stream("and now?")))
        return texts

    assert await asyncio.to_thread(talk) == ["w5 w9", "w2"]
    messages = engine.calls[-1].body["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert [(m["tool_call_id"], m["content"]) for m in messages[2:4]] == [
        ("call_1", '{"result": 4}'),
        ("call_2", '{"result": 5}'),
    ]
    assert engine.calls[0].body["tools"][0]["function"]["parameters"]["properties"]["x"]["type"] == "integer"
    capture = await captured(client, session)
    assert len(build_trajectory(session.session_id, capture.turns).sequences) == 1


async def test_the_parameters_of_a_request_reach_the_engine(engine: ScriptedEngine, session: SessionHandle) -> None:
    llm = google(session)
    sampling: Any = {"max_output_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 3}
    sampling |= {"stop_sequences": ["zz"], "presence_penalty": 0.1, "frequency_penalty": 0.2}
    thinking = types.ThinkingConfig(thinking_budget=0)
    whole = await llm.aio.models.generate_content(
        model="a/b c", contents="hi", config=types.GenerateContentConfig(**sampling, thinking_config=thinking)
    )
    assert [candidate.index for candidate in whole.candidates] == [0]
    body = engine.calls[-1].body
    wanted = {"model": "a/b c", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 40}
    wanted |= {"seed": body["seed"], "stop": ["zz"], "presence_penalty": 0.1, "frequency_penalty": 0.2}
    assert {name: body[name] for name in wanted} == wanted
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    engine.tokens = 50
    parts, last = await reply_of(
        llm, "hi", stream=True, max_output_tokens=5, thinking_config=types.ThinkingConfig(thinking_level="LOW")
    )
    assert (last.candidates[0].finish_reason, len(parts)) == (types.FinishReason.MAX_TOKENS, 5)
    assert engine.calls[-1].body["reasoning_effort"] == "low"


async def test_schemas_reach_the_engine(engine: ScriptedEngine, session: SessionHandle) -> None:
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int
        y: list[str]

    engine.replies.extend([{"content": '{"x": 1, "y": ["a"]}'}] * 3)
    llm, kind = google(session), "application/json"
    _, last = await reply_of(llm, "hi", stream=False, response_mime_type=kind, response_schema=Point)
    assert last.parsed == Point(x=1, y=["a"])
    await reply_of(llm, "hi", stream=False, response_mime_type=kind, response_json_schema=Point.model_json_schema())
    await reply_of(llm, "hi", stream=False, response_mime_type=kind)
    typed, given, free = (seen.body["response_format"] for seen in engine.calls)
    schema = typed["json_schema"]["schema"]
    assert (schema["type"], schema["properties"]["y"]["items"]["type"], schema["required"]) == (
        "object",
        "string",
        ["x", "y"],
    )
    assert given["json_schema"]["schema"] == Point.model_json_schema()
    assert free == {"type": "json_object"}


async def test_images_are_sent_on_and_other_media_become_a_line_that_is_counted(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    parts = [
        types.Part(text="see"),
        types.Part.from_bytes(data=b"png", mime_type="image/png"),
        types.Part.from_bytes(data=b"pdf", mime_type="application/pdf"),
        types.Part.from_uri(file_uri="gs://a/b", mime_type="video/mp4"),
    ]
    await reply_of(google(session), [types.Content(role="user", parts=parts)], stream=False)
    text, image, *others = engine.calls[0].body["messages"][0]["content"]
    assert (text["text"], image["image_url"]["url"]) == ("see", "data:image/png;base64,cG5n")
    assert [part["text"] for part in others] == [
        f"[{kind}: the model reads text only]" for kind in ("inlineData", "fileData")
    ]
    capture = await captured(client, session)
    assert dict(capture.turns[0].left_out) == {"inlineData": 1, "fileData": 1}


async def test_errors_are_in_googles_shape(engine: ScriptedEngine, gateway: Gateway, session: SessionHandle) -> None:
    llm = google(session)
    with pytest.raises(errors.ClientError) as caught:
        await reply_of(llm, "hi", stream=False, max_output_tokens=-1)
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
    assert "maxOutputTokens" in caught.value.message
    begun = [
        types.Content(role="user", parts=[types.Part(text="a")]),
        types.Content(role="model", parts=[types.Part(text="b")]),
    ]
    with pytest.raises(errors.ClientError, match=r"contents\[1\]"):
        await reply_of(llm, begun, stream=False)
    for status, kind, name in (
        (429, errors.ClientError, "RESOURCE_EXHAUSTED"),
        (500, errors.ServerError, "INTERNAL"),
    ):
        engine.faults.extend([Fault(status=status)] * 4)
        with pytest.raises(kind) as failed:
            await reply_of(llm, "hi", stream=True)
        assert failed.value.status == name, failed.value
        engine.faults.clear()
    llm = client_of("wrong", base_url=session.base_url.removesuffix("/v1"))
    with pytest.raises(errors.ClientError) as refused:
        await reply_of(llm, "hi", stream=False)
    assert (refused.value.code, refused.value.status) == (401, "UNAUTHENTICATED")


async def test_a_stream_that_breaks_raises(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    engine.faults.append(Fault(drop_after=600))
    with pytest.raises(Exception, match=r".") as caught:
        await reply_of(google(session), "hi", stream=True)
    assert not isinstance(caught.value, AssertionError), caught.value
    assert len((await captured(client, session)).errors) == 1


async def test_a_slow_stream_is_kept_alive(engine: ScriptedEngine, start_gateway: Start) -> None:
    gateway = await start_gateway(engine, limits=Limits(connect_s=60.0, keep_alive_s=0.02))
    session = await opened(gateway)
    engine.token_s = 0.1
    engine.faults.append(Fault(delay_s=0.2))
    engine.replies.append({"content": "w1 w2"})
    parts, _ = await reply_of(google(session), "hi", stream=True)
    assert [part.text for part in parts] == ["w1", " w2"]


async def test_a_tag_in_the_base_url_is_recorded(client: GatewayClient, session: SessionHandle) -> None:
    for version in ("v1", "v1beta"):
        llm = client_of(session.api_key, base_url=f"{session.base_url}/tag/judge", api_version=version)
        await reply_of(llm, "hi", stream=False)
    assert [turn.tag for turn in (await captured(client, session)).turns] == ["judge", "judge"]

"""A session that could not make a good call is refused when it is opened, not when its agent calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.messages.wire.passthrough import KNOWN
from scripted_engine import ScriptedEngine

from ..asking import MODEL, Start, ask, gpt, opened, status_of

BAD_PARAMS: list[dict[str, Any]] = [
    {"stream": True},
    {"messages": []},
    {"prompt": "x"},
    {"model": "x"},
    {"return_token_ids": False},
    {"n": "x"},
    {"n": 0},
    {"n": 1000},
    {"stop": 5},
    {"stop": [5]},
    {"max_tokens": -5},
    {"temperature": "hot"},
    {"temperature": -1},
    {"top_p": 2},
    {"seed": 1.5},
    {"chat_template_kwargs": 5},
    {"response_format": "json"},
    {"stop_token_ids": ["x"]},
    {"logit_bias": []},
    {"top_logprobs": 5},
    {"tool_choice": "always"},
    {"tool_choice": {"type": "allowed_tools"}},
    {"tool_choice": {"type": "function", "function": {}}},
    {"tool_choice": {"type": "function", "function": "f"}},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": []},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "xml"}},
    {"chat_template_kwargs": {"messages": []}},
    {"max_completion_tokens": 5, "max_tokens": 5},
    {"lora_path": "/x"},
    {"wings": 2},
    {"ebnf": "x"},
    {"request_id": "x"},
    {"logits_processors": ["x"]},
    {"tools": [{"type": "web_search"}]},
    {"tool_choice": "required", "response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
]
BAD_SETTINGS: list[dict[str, Any]] = [
    {"max_turns": -1},
    {"max_tokens": 0},
    {"max_tokens": -3},
    {"model_id": ""},
]


async def test_a_bad_setting_is_named_when_the_session_is_opened(client: GatewayClient) -> None:
    for params in BAD_PARAMS:
        with pytest.raises(GatewayError, match=rf"sampling_params.*{next(iter(params))}") as caught:
            await client.create_sessions_async([new_session_id()], sampling_params=params)
        assert caught.value.status == 400
    for settings in BAD_SETTINGS:
        with pytest.raises(GatewayError, match=next(iter(settings))) as caught:
            await client.create_sessions_async([new_session_id()], **settings)
        assert caught.value.status == 400
    assert (await client.stats_async())["sessions"] == 0


async def test_what_engines_take_passes(client: GatewayClient) -> None:
    params = {
        "temperature": 1,
        "top_k": -1,
        "n": 2,
        "stop": ["a"],
        "seed": None,
        "logprobs": True,
        "vllm_xargs": {"a": 1},
    }
    await client.create_sessions_async(
        [new_session_id()], sampling_params=params, max_turns=0, max_tokens=1, model_id="m"
    )


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
VALUES: dict[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), 0.5),
    **dict.fromkeys(
        ("repetition_penalty", "top_k", "seed", "max_tokens", "max_completion_tokens", "n", "min_tokens"), 2
    ),
    **dict.fromkeys(("ignore_eos", "logprobs"), True),
    **{name: [7] for name in ("stop_token_ids", "allowed_token_ids")},
    **{name: ["a"] for name in ("stop", "bad_words")},
    **{name: {"1": 1} for name in ("structured_outputs", "logit_bias")},
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "response_format": {"type": "json_object"},
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
}
ALL = {name: VALUES.get(name, "x") for name in sorted(KNOWN)}
FORMS = {"response_format", "tool_choice", "parallel_tool_calls", "structured_outputs"}
COMMON = {
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "top_k",
    "seed",
}
COMMON |= {"max_tokens", "max_completion_tokens", "n", "stop", "logit_bias", "logprobs", "tools"}
COMMON |= {"chat_template_kwargs", "reasoning_effort"}
SAMPLER = {"stop_token_ids", "allowed_token_ids", "bad_words", "ignore_eos", "min_tokens", "thinking_token_budget"}
KEPT = {"vllm": (COMMON | FORMS | SAMPLER) - {"parallel_tool_calls"}, "policy": COMMON}


async def opened_with(gateway: Gateway, params: dict[str, Any]) -> SessionHandle | None:
    """The session, or None where its parameters are refused by name."""
    name = next(iter(params))
    body = {"session_ids": [new_session_id()], "settings": {"sampling_params": params}}
    status, reply = await request("POST", gateway.url + "/admin/sessions", body=body)
    if status == 200:
        return await opened(gateway, sampling_params=params)
    assert (status, b"sampling_params" in reply, name.encode() in reply) == (400, True, True), reply
    return None


async def test_relayed_calls_have_every_parameter_of_their_session(engine: ScriptedEngine, gateway: Gateway) -> None:
    kept = set()
    for name, value in ALL.items():
        session = await opened_with(gateway, {name: value})
        if session is None:
            continue
        kept.add(name)
        assert await status_of(session, tools=[TOOL]) == 200, name
        assert engine.calls[-1].body[name] == value
        assert await status_of(session) == 200, name
        assert ("tool_choice" in engine.calls[-1].body) is (name == "tool_choice" and "tools" in engine.calls[-1].body)
    assert kept > KEPT["vllm"]
    assert kept.isdisjoint({"messages", "model", "stream", "ebnf", "regex", "chat_template", "prompt_logprobs"})


@pytest.mark.parametrize("kind", ["vllm", "policy"])
async def test_calls_over_token_ids_have_every_parameter_of_their_session(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, kind: str
) -> None:
    engine.first_id, engine.last_id = 300, 500
    template, variables = tmp_path / "variables.jinja", "{{ reasoning_effort or enable_thinking }}"
    template.write_text(variables + (MODEL / "chat_template.jinja").read_text())
    gateway = await start_gateway(engine, engine=kind, model_dir=str(MODEL), template=str(template))
    renderer = Renderer.from_path(MODEL)
    kept = set()
    for name, value in ALL.items():
        session = await opened_with(gateway, {name: value})
        if session is None:
            continue
        kept.add(name)
        assert await status_of(session) == 200, name
        seen = engine.calls[-1]
        assert "structural_tag" not in str(seen.body)
        prompt = renderer.decode(seen.prompt_ids)
        assert ("look_up" in prompt) is (name == "tools")
        first = {"reasoning_effort": "low", "chat_template_kwargs": "False"}.get(name, "")
        assert prompt.startswith(first + "<|im_start|>"), prompt
        status, reply = await ask(session, tools=[TOOL])
        assert status == 200, name
        sampling = engine.calls[-1].body["sampling_params"]
        if name in FORMS:
            assert sampling["structured_outputs"]
        elif name == "stop_token_ids":
            assert set(value) < set(sampling[name])
        elif name == "logprobs":
            assert json.loads(reply)["choices"][0]["logprobs"]["content"]
        elif name not in ("tools", "chat_template_kwargs", "reasoning_effort"):
            assert sampling["max_tokens" if name == "max_completion_tokens" else name] == value
    assert kept == KEPT[kind]


OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "other"}}
JSON_OBJECT = {"type": "json_object"}
TOOLS: dict[str, Any] = {"tools": [OTHER]}
# A session's parameters, what an agent asks for, and the fields that the call is left with: those of the session, and these.
OVERLAID: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"response_format": JSON_OBJECT}, {"structured_outputs": {"regex": ".*"}}, {}),
    ({"response_format": JSON_OBJECT}, {**TOOLS, "tool_choice": "required"}, TOOLS),
    (
        {"response_format": JSON_OBJECT},
        {**TOOLS, "parallel_tool_calls": False},
        {**TOOLS, "parallel_tool_calls": False},
    ),
    ({"structured_outputs": {"regex": "a"}}, {"response_format": JSON_OBJECT}, {}),
    ({"tool_choice": "required"}, {**TOOLS, "structured_outputs": {"regex": ".*"}}, TOOLS),
    ({"tool_choice": "required"}, {"response_format": JSON_OBJECT}, {"response_format": JSON_OBJECT}),
    ({"tools": [TOOL]}, {**TOOLS, "tool_choice": NAMED}, {}),
    ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"reasoning_effort": "high"}}, {}),
    ({"logprobs": False}, {"logprobs": True, "top_logprobs": 5}, {}),
    ({"n": 2.0, "max_tokens": 16.0}, {"max_completion_tokens": 99}, {"n": 2, "max_tokens": 16}),
]


@pytest.mark.parametrize("model", [None, MODEL])
async def test_a_sessions_parameter_replaces_all_that_agents_ask_for_on_its_subject(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, model: Path | None
) -> None:
    engine.first_id, engine.last_id = 300, 500
    settings, renderer = {}, Renderer.from_path(MODEL)
    if model is not None:
        template = tmp_path / "variables.jinja"
        template.write_text("{{ reasoning_effort }}" + (model / "chat_template.jinja").read_text())
        settings = {"model_dir": str(model), "template": str(template)}
    gateway = await start_gateway(engine, **settings)
    unknown = {"chat_template_kwargs": {"enbale_thinking": False}}
    assert model is None or await opened_with(gateway, unknown) is None
    for params, asked, left in OVERLAID:
        session = await opened(gateway, sampling_params=params)
        status, reply = await ask(session, **asked)
        assert status == 200, reply
        body = engine.calls[-1].body
        kept = {**params, **left}
        if "tools" not in kept:
            kept.pop("tool_choice", None)
        if model is None:
            names = {*body, "logprobs"} - {"model", "messages", "return_token_ids"}
            sent = {name: body[name] for name in names}
            assert json.dumps(sent, sort_keys=True) == json.dumps({**kept, "logprobs": True}, sort_keys=True)
            continue
        forms = {"structured_outputs": "regex", "tool_choice": "structural_tag"}
        forms["response_format"] = "structural_tag" if kept.get("tools") else "json_object"  # calls, or an object
        sampling, prompt = body["sampling_params"], renderer.decode(engine.calls[-1].prompt_ids)
        assert list(sampling.get("structured_outputs", ())) == [forms[name] for name in kept if name in forms]
        assert prompt.startswith(kept.get("reasoning_effort", "") + "<|im_start|>")
        assert [tool["function"]["name"] in prompt for tool in (TOOL, OTHER)] == [
            tool in kept.get("tools", []) for tool in (TOOL, OTHER)
        ]
        assert repr([sampling["max_tokens"], sampling.get("n")]) == ("[16, 2]" if "n" in kept else "[4096, None]")


async def test_a_session_cannot_require_a_call_that_cannot_be_enforced(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine, model_dir=str(MODEL), parser="glm")  # no engine enforces its calls
    assert await opened_with(gateway, {"tool_choice": "required"}) is None


@pytest.mark.parametrize("model_dir", [None, str(MODEL)])
async def test_a_named_tool_is_required_of_the_calls_that_offer_it(
    engine: ScriptedEngine, start_gateway: Start, model_dir: str | None
) -> None:
    choice = {"type": "function", "function": {"name": "look_up"}}
    session = await opened(await start_gateway(engine, model_dir=model_dir), sampling_params={"tool_choice": choice})
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    for offered, forced in (([TOOL, other], True), ([other], False)):
        assert await status_of(session, tools=offered) == 200
        body = engine.calls[-1].body
        assert (("structural_tag" in str(body)) if model_dir else (body.get("tool_choice") == choice)) is forced


@pytest.mark.parametrize("seed", [42, 42.0])
@pytest.mark.parametrize("model_dir", [None, str(MODEL)])
async def test_an_agents_seed_gives_each_rollout_another_sample(
    engine: ScriptedEngine, start_gateway: Start, model_dir: str | None, seed: Any
) -> None:
    gateway = await start_gateway(engine, model_dir=model_dir)
    first, second = await opened(gateway), await opened(gateway)
    trainers = await opened(gateway, sampling_params={"seed": 7})
    for session in (first, second, first, trainers):
        async with gpt(session) as llm:
            await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], seed=seed)
    bodies = [call.body.get("sampling_params", call.body) for call in engine.calls]
    assert (len({body["seed"] for body in bodies[:3]}), bodies[0]["seed"], bodies[3]["seed"]) == (
        2,
        bodies[2]["seed"],
        7,
    )

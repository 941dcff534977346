"""Calls that force a tool or a schema, images, and histories of other sessions, as frameworks send them, in token mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway import Gateway, SessionHandle
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.trajectory import FidelityReport, Turn, build_trajectory
from scripted_engine import ScriptedEngine

from ...messages.render.conftest import FAMILIES, TEMPLATES, write_model
from ..asking import MODEL, Start, ask, captured, claude, gpt, message_of, opened
from .test_sampling import FORMAT, TOOLS, USER, constraint

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call><|im_end|>'
THOUGHT = "I add 2 and 3.\n</think>"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template opens the thinking."""
    folder = write_model(FAMILIES["qwen3"], tmp_path_factory.mktemp("models") / "thinker")
    template = (TEMPLATES / "qwen3.jinja").read_text("utf-8")
    opened = "{{ '<|im_start|>assistant\\n<think>\\n' }}"
    (folder / "chat_template.jinja").write_text(
        template.replace("{{ '<|im_start|>assistant\\n' }}\n{%- if enable", opened + "\n{%- if enable"), "utf-8"
    )
    return folder


def will_say(engine: ScriptedEngine, renderer: Renderer, text: str) -> list[int]:
    ids = renderer.encode(text)
    engine.replies.append({"token_ids": ids})
    return ids


async def read(gateway: Gateway, session: SessionHandle) -> tuple[list[Turn], FidelityReport]:
    capture = await captured(gateway, session)
    return capture.turns, build_trajectory(session.session_id, capture.turns).report


@pytest.mark.parametrize("asked", [{"response_format": FORMAT}, {"tool_choice": "required"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_thinking_before_a_forced_call_is_free_and_trains(
    asked: Any, stream: bool, thinker: Path, engine: ScriptedEngine, start_gateway: Start
) -> None:
    renderer = Renderer.from_path(thinker)
    gateway = await start_gateway(engine, model_dir=str(thinker))
    session = await opened(gateway)
    ids = will_say(engine, renderer, THOUGHT + "\n\n" + CALL)
    free = len(renderer.encode(THOUGHT))
    status, reply = await ask(session, "What is 2 + 3?", tools=TOOLS, stream=stream, **asked)
    assert (status, b"calculator" in reply) == (200, True)
    assert list(constraint(engine.calls[0].body)) == ["structural_tag"]
    form = constraint(engine.calls[0].body)["structural_tag"]["format"]
    assert form["elements"][0] == {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
    [turn], report = await read(gateway, session)
    assert (turn.free_tokens, turn.why_untrainable()) == (free, None)
    assert (report.trained_tokens, report.held_tokens) == (free, len(ids) - free)
    [sequence] = build_trajectory(session.session_id, [turn]).sequences
    begin = len(turn.prompt_ids)
    assert sequence.loss_mask == [0] * begin + [1] * free + [0] * (len(ids) - free)
    assert sequence.logprobs == [None] * begin + list(turn.logprobs[:free]) + [None] * (len(ids) - free)
    assert sequence.weight == 1.0


async def test_an_answer_that_used_no_form_trains_whole(
    thinker: Path, engine: ScriptedEngine, start_gateway: Start
) -> None:
    renderer = Renderer.from_path(thinker)
    gateway = await start_gateway(engine, model_dir=str(thinker))
    session = await opened(gateway)
    ids = will_say(engine, renderer, THOUGHT + "\n\nIt is 5.<|im_end|>")
    cut = will_say(engine, renderer, "I add 2 and")
    for more in ({"parallel_tool_calls": False}, {"tool_choice": "required"}):
        assert (await ask(session, tools=TOOLS, **more))[0] == 200
    assert constraint(engine.calls[0].body) == {}  # no grammar allows text or one call
    turns, report = await read(gateway, session)
    assert [(turn.free_tokens, turn.trained_tokens) for turn in turns] == [(None, len(ids)), (None, len(cut))]
    assert report.held_tokens == 0


FORCED: list[tuple[dict[str, Any], set[str]]] = [
    ({"tools": TOOLS, "tool_choice": "required"}, {"tool_choice"}),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look_up"}}}, {"tool_choice"}),
    ({"tools": TOOLS, "response_format": FORMAT}, {"response_format"}),
    ({"response_format": {"type": "json_object"}}, {"response_format"}),
]
ENGINES_OWN: list[tuple[dict[str, Any], set[str]]] = [
    ({"structured_outputs": {"json": {"type": "object"}}}, {"structured_outputs"}),
    ({"json_schema": '{"type": "object"}'}, {"json_schema"}),
    ({"regex": "a+"}, {"regex"}),
]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("policy", {"model_dir": str(MODEL)}),  # it has no grammars
        ("vllm", {"model_dir": str(MODEL), "parser": "glm"}),  # no engine enforces its calls
        ("vllm", {"model_dir": str(MODEL), "forced_tools": "wish"}),
        ("vllm", {"forced_tools": "wish"}),  # relay mode
    ],
)
async def test_a_wish_is_a_free_call_that_is_counted_and_trains(
    kind: str, settings: Any, engine: ScriptedEngine, start_gateway: Start
) -> None:
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, engine=kind, **settings)
    for asked, wishes in [*FORCED, *(ENGINES_OWN if "forced_tools" in settings else ())]:
        if settings.get("parser") == "glm" and "tools" not in asked:
            continue  # a schema alone is enforced
        session = await opened(gateway)
        status, reply = await ask(session, **asked)
        assert status == 200, reply
        body = engine.calls[-1].body
        forms = {"tool_choice", "response_format", "structured_outputs", "json_schema", "regex"}
        assert not forms & {*body, *body.get("sampling_params", {})}
        [turn], report = await read(gateway, session)
        assert (set(report.left_out), turn.why_untrainable()) == (wishes, None)
        assert report.trained_tokens == len(turn.completion_ids)


@pytest.mark.parametrize("model_dir", [None, str(MODEL)])
async def test_forced_calls_can_be_refused(model_dir: str | None, engine: ScriptedEngine, start_gateway: Start) -> None:
    session = await opened(await start_gateway(engine, model_dir=model_dir, forced_tools="refuse"))
    for asked, wishes in FORCED + ENGINES_OWN:
        status, reply = await ask(session, **asked)
        assert (status, {json.loads(reply)["error"]["param"]}) == (400, wishes)
        assert b"forced_tools=refuse" in reply
    assert (await ask(session, tools=TOOLS, tool_choice="auto", parallel_tool_calls=False))[0] == 200


async def test_an_image_is_a_line_of_text_in_token_mode_and_counted(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    renderer, session = Renderer.from_path(MODEL), await opened(gateway)
    url = "data:image/png;base64,iVBORw0KGgo="
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    async with gpt(session) as llm, claude(session) as anthropic:
        shown: Any = [{"type": "text", "text": "What is it? "}, {"type": "image_url", "image_url": {"url": url}}]
        await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": shown}])
        item: Any = {"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "low"}]}
        await llm.responses.create(model="m", input=[item])
        block: Any = {"role": "user", "content": [{"type": "image", "source": source}]}
        await anthropic.messages.create(model="m", max_tokens=5, messages=[block])
        counted = await anthropic.messages.count_tokens(model="m", messages=[block])
    prompts = [renderer.decode(call.prompt_ids) for call in engine.calls]
    assert all("[image: the model reads text only]" in prompt for prompt in prompts)
    assert counted.input_tokens == len(engine.calls[-1].prompt_ids)
    _, report = await read(gateway, session)
    assert (report.left_out, report.untrainable_turns, report.turns) == ({"image": 3}, 0, 3)


@pytest.mark.parametrize("model_dir", [None, str(MODEL)])
async def test_answers_in_a_first_prompt_that_the_session_never_sampled_are_counted(
    model_dir: str | None, engine: ScriptedEngine, start_gateway: Start
) -> None:
    """A global agent object keeps its history, so the second rollout of a process begins with the task of the first."""
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, model_dir=model_dir)
    history: list[Any] = []
    found = []
    for task in ("What is 2 + 3?", "What is 4 + 5?"):
        session = await opened(gateway)
        for text in (task, "Are you sure?"):
            history.append({"role": "user", "content": text})
            status, reply = await ask(session, messages=history)
            assert status == 200, reply
            history.append(json.loads(reply)["choices"][0]["message"])
        _, report = await read(gateway, session)
        found.append(report.unsampled_answers)
    assert found == [0, 2]


async def test_odd_results_names_and_schemas_of_tools_are_taken(engine: ScriptedEngine, start_gateway: Start) -> None:
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    session = await opened(gateway)
    call = {"id": "c1", "type": "function", "function": {"name": "", "arguments": ""}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": None},
    ]
    odd = {"type": "dict", "properties": {"row": {"$ref": "#/$defs/Row"}, "kind": {"type": "float"}}}
    tools = [{"type": "function", "function": {"name": "odd", "parameters": odd}}]
    status, reply = await ask(session, messages=history, tools=tools, tool_choice="required")
    assert status == 200, reply
    _, calls = constraint(engine.calls[0].body)["structural_tag"]["format"]["elements"]
    [tag] = calls["tags"]
    assert tag["content"]["json_schema"] == {"type": "object"}
    prompt = Renderer.from_path(MODEL).decode(engine.calls[0].prompt_ids)
    assert "null" in prompt
    assert '"type": "dict"' in prompt  # the model sees the agent's own schema


async def test_with_the_templates_history_an_engine_gets_what_the_template_writes(
    thinker: Path, engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    renderer = Renderer.from_path(thinker)
    gateway = await start_gateway(engine, model_dir=str(thinker), history="template", store_dir=str(tmp_path / "store"))
    session = await opened(gateway)
    messages: list[dict[str, Any]] = []
    for step in range(3):
        will_say(engine, renderer, f"I think of {step}.\n</think>\n\nAnswer {step}.<|im_end|>")
        messages.append({"role": "user", "content": f"What is {step}?"})
        reply = await message_of(session, messages)
        assert reply["content"] == f"Answer {step}."
        sent = engine.calls[-1].prompt_ids
        assert renderer.decode(sent) == renderer.template.render(messages)
        messages.append(reply)
    turns, report = await read(gateway, session)
    assert [turn.branch_reason for turn in turns] == [None, "template", "template"]
    assert report.trained_tokens == report.sampled_tokens
    assert report.history_difference is not None
    assert report.history_difference > 0.1

"""The families' true chat templates, as packages carry them: self-test, and a long session of tools and reasoning.

The tokenizers are small stand-ins with the families' markers; what a template writes does not depend on the rest. TRL has
most of the templates, the source archive of llama-cpp-python (llama.cpp's collection, fetched from the models) the others.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.cli.doctor.template import examine
from agentcore_rl_toolkit.messages.render import Renderer, sampled_body
from agentcore_rl_toolkit.messages.render.template import ChatTemplate
from agentcore_rl_toolkit.trajectory import FidelityReport, Turn, build_trajectory

from .test_habits import ORDERS

# template -> the family of tests/messages/render/conftest.py that has its markers; parser that it must suggest
IN_TRL = {
    "qwen2_5": ("hermes", "hermes"),
    "qwen3": ("qwen3", "hermes"),
    "qwen3_instruct_2507": ("qwen3", "hermes"),
    "qwen3_5_think": ("qwen_coder", "qwen_coder"),
    "qwen3_5_nothink": ("qwen_coder", "qwen_coder"),
    "qwen3_6": ("qwen_coder", "qwen_coder"),
    "qwen3_8": ("qwen_coder", "qwen_coder"),
    "llama3": ("llama3", "plain"),
    "llama3_1": ("llama3", "llama"),
    "llama3_2": ("llama3", "llama"),
    "glm4moe": ("glm", "glm"),
    "gptoss": ("harmony", "harmony"),
    "deepseekv3": ("deepseek_v3", "deepseek"),
    "deepseek_r1_distill": ("deepseek_r1", "deepseek"),
    "nemotron_3_nano": ("qwen_coder", "qwen_coder"),
    **{f"gemma4{version}": ("gemma", "gemma") for version in ("", "_v2", "_v3", "_v4", "_v5")},
    **{f"lfm2_2_5{version}": ("lfm", "lfm") for version in ("", "_v2")},
    "muse_glimmer": ("muse", "muse"),
}
IN_ARCHIVE = {
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", "hermes"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", "hermes"),
    "Qwen3-Coder": ("qwen_coder", "qwen_coder"),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3", "llama"),
    "GLM-4.6": ("glm", "glm"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_r1", "deepseek"),
    "google-gemma-4-31B-it-interleaved": ("gemma", "gemma"),
    "moonshotai-Kimi-K2": ("kimi", "kimi"),
    "MiniMax-M2": ("minimax", "minimax"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", "mistral"),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
}
TEMPLATES = {**IN_TRL, **IN_ARCHIVE}
REPEATED = {"gemma4_v2", "gemma4_v3", "gemma4_v4"}  # they differ in details from the first and the last version
OF_TRL = [pytest.param(name, marks=pytest.mark.nightly if name in REPEATED else ()) for name in IN_TRL]
EVERY = [*OF_TRL, *(pytest.param(name, marks=pytest.mark.nightly) for name in IN_ARCHIVE)]  # 77 MB to fetch
WITHOUT_TOOLS = {"llama3", "deepseek_r1_distill"}
# Hermes has two templates: this one where there are no tools, and the archive's.
HERMES_DEFAULT = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def in_trl(trl_python: str) -> Path:
    asked = [trl_python, "-c", "import importlib.util; print(importlib.util.find_spec('trl').origin)"]
    return (
        Path(subprocess.run(asked, capture_output=True, text=True, timeout=300, check=True).stdout).parent
        / "chat_templates"
    )


@pytest.fixture(scope="module")
def load(
    request: pytest.FixtureRequest, model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Renderer]:
    """``load("qwen3")`` -> the renderer of a template; shared, renderers have no state."""

    @functools.cache
    def load(name: str) -> Renderer:
        folder = model_dir(TEMPLATES[name][0])
        home: Path = request.getfixturevalue("in_trl" if name in IN_TRL else "in_archive")
        template = home / f"{name}.jinja"
        if "Hermes" not in name:
            return Renderer.from_path(folder, template=template)
        named_folder = tmp_path_factory.mktemp("hermes")
        config = json.loads((folder / "tokenizer_config.json").read_text())
        named = {"default": HERMES_DEFAULT, "tool_use": template.read_text("utf-8")}
        config["chat_template"] = [{"name": each, "template": text} for each, text in named.items()]
        (named_folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|endoftext|>"}))
        for other in ("tokenizer.json", "generation_config.json"):
            (named_folder / other).write_bytes((folder / other).read_bytes())
        return Renderer.from_path(named_folder)

    return load


@pytest.mark.parametrize("name", EVERY)
def test_every_true_template_passes_the_self_test(name: str, load: Callable[[str], Renderer]) -> None:
    renderer = load(name)
    report = examine(renderer)
    assert {finding.level for finding in report} == {"ok"}, report
    assert renderer.grammar.name == TEMPLATES[name][1]
    of_tools = [finding.name for finding in report if "tool calls" in finding.name]
    assert len(of_tools) == (0 if name in WITHOUT_TOOLS else 2)


@pytest.mark.parametrize("name", [*OF_TRL, "gemma3", "cohere", "cohere2"])
def test_true_templates_take_unusual_orders_of_roles(name: str, in_trl: Path, tools: list[dict[str, Any]]) -> None:
    template = ChatTemplate((in_trl / f"{name}.jinja").read_text("utf-8"), special_tokens={"bos_token": "<s>"})
    for order, (messages, words) in ORDERS.items():
        for offered in (None, tools):
            text, at = template.render(messages, tools=offered, now=0.0), -1
            for word in words:
                at = text.find(word, at + 1)
                assert at >= 0, (order, text)


def answer(step: int, *, calls: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "" if calls else f"Answer {step}: naïve ✓"}
    if calls:
        function = {"name": "look_up", "arguments": json.dumps({"query": f'"{step}"\n<漢字>', "limit": step})}
        message["tool_calls"] = [{"id": f"call_{step:05}", "type": "function", "function": function}]
    return message


@pytest.mark.parametrize("name", EVERY)
def test_ten_turns_of_tools_and_text_extend_each_other(
    name: str, load: Callable[[str], Renderer], tools: list[dict[str, Any]]
) -> None:
    renderer = load(name)
    offered = None if name in WITHOUT_TOOLS else tools
    conversation = renderer.conversation(now=0.0)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]
    before: list[int] = []
    for step in range(10):
        text = answer(step, calls=offered is not None and step % 3 != 2)
        prompt = renderer.render(conversation, json.loads(json.dumps(messages)), offered)
        assert prompt.token_ids[: len(before)] == before
        assert prompt.extended == bool(step)
        completion = sampled_body(renderer, text, tools=offered)
        assert completion
        if prompt.opens_reasoning and "</think>" not in renderer.decode(completion):
            completion = [*renderer.encode("hm</think>"), *completion]  # the template leaves it out of a history
        parsed = renderer.parse(completion, tools=offered, opens_reasoning=prompt.opens_reasoning).to_message()
        wanted = [json.loads(c["function"]["arguments"]) for c in text.get("tool_calls", [])]
        assert [json.loads(c["function"]["arguments"]) for c in parsed.get("tool_calls", [])] == wanted
        assert (parsed["content"] or "").strip() == text["content"]
        conversation.commit(prompt, completion, parsed, turn_id=f"t{step}")
        before = [*prompt.token_ids, *completion]
        messages.append(parsed)
        for call in parsed.get("tool_calls", []):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"found {step}"})
        if not wanted:
            messages.append({"role": "user", "content": f"and {step}?"})


def session(renderer: Renderer) -> FidelityReport:
    """Three turns with thinking, as an agent makes them that sends the thinking back. Returns the report of their trajectory."""
    conversation, turns = renderer.conversation(now=0.0), []
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    for step in range(3):
        prompt = renderer.render(conversation, json.loads(json.dumps(messages)))
        assert (prompt.branch_reason, prompt.extended) == (None, bool(step)) or (
            renderer.history == "template" and step
        )
        if renderer.history == "template":
            whole = renderer.template.render(messages, now=0.0)
            assert renderer.decode(prompt.token_ids) == whole
        said = f"I think of {step}, and of more.\n</think>\n\nAnswer {step}.<|im_end|>"
        completion = renderer.encode(said if prompt.opens_reasoning else f"<think>\n{said}")
        parsed = renderer.parse(completion, opens_reasoning=prompt.opens_reasoning).to_message()
        assert (parsed["reasoning_content"], parsed["content"]) == (
            f"I think of {step}, and of more.",
            f"Answer {step}.",
        )
        conversation.commit(prompt, completion, parsed, turn_id=f"t{step}")
        turns.append(
            Turn(
                turn_id=f"t{step}",
                index=step,
                prompt_ids=prompt.token_ids,
                completion_ids=completion,
                logprobs=[-1.0] * len(completion),
                finish_reason="stop",
                parent_turn=prompt.parent_turn,
                branch_reason=prompt.branch_reason,
            )
        )
        messages += [parsed, {"role": "user", "content": f"and {step}?"}]
    trajectory = build_trajectory("s", turns)
    trained = [turn_id for sequence in trajectory.sequences for turn_id in sequence.turn_ids]
    assert sorted(trained) == ["t0", "t1", "t2"]  # each once
    return trajectory.report


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think"])
def test_a_history_is_as_sampled_or_as_the_template_writes_it(
    name: str, in_trl: Path, model_dir: Callable[[str], Path], load: Callable[[str], Renderer]
) -> None:
    folder, template = model_dir(TEMPLATES[name][0]), in_trl / f"{name}.jinja"
    sampled = session(load(name))
    assert (sampled.sequences, sampled.branch_reasons, sampled.history_difference) == (1, {}, None)
    report = session(Renderer.from_path(folder, template=template, history="template"))
    assert (report.sequences, report.branch_reasons) == (3, {"template": 2})
    assert report.trained_tokens == report.sampled_tokens == sampled.sampled_tokens
    assert report.history_difference is not None
    assert 0.2 < report.history_difference < 0.6


def test_a_template_for_tools_is_found_where_transformers_saves_it(
    model_dir: Callable[[str], Path], tmp_path: Path, tools: list[dict[str, Any]]
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = model_dir("hermes")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    with_tools = (folder / "chat_template.jinja").read_text("utf-8")
    tokenizer.chat_template = {"default": HERMES_DEFAULT, "tool_use": with_tools}
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text("utf-8") == HERMES_DEFAULT  # the layout in question
    saved = Renderer.from_path(tmp_path)
    messages = [{"role": "user", "content": "hello"}]
    for offered in (tools, None):
        rendered = saved.render(saved.conversation(now=0.0), messages, offered).token_ids
        assert rendered == tokenizer.apply_chat_template(
            messages, tools=offered, add_generation_prompt=True, return_dict=False
        )

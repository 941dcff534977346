"""The families' true chat templates, as the TRL package carries them: self-test, and a long session of tools and reasoning.

The tokenizers are small stand-ins with the families' markers; what a template writes does not depend on the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway.render import Renderer, examine
from agentcore_rl_toolkit.gateway.render.doctor import sampled_body

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"

# template -> the family of tests/gateway/render/conftest.py that has its markers; parser that it must suggest
TEMPLATES = {
    "qwen2_5": ("hermes", "hermes"),
    "qwen3": ("qwen3", "hermes"),
    "qwen3_instruct_2507": ("qwen3", "hermes"),
    "qwen3_5_think": ("qwen_coder", "qwen_coder"),
    "qwen3_5_nothink": ("qwen_coder", "qwen_coder"),
    "qwen3_6": ("qwen_coder", "qwen_coder"),
    "llama3": ("llama3", "plain"),
    "llama3_1": ("llama3", "llama"),
    "llama3_2": ("llama3", "llama"),
    "glm4moe": ("glm", "glm"),
    "gptoss": ("harmony", "harmony"),
    "deepseekv3": ("deepseek_v3", "deepseek"),
    "deepseek_r1_distill": ("deepseek_r1", "deepseek"),
    "nemotron_3_nano": ("qwen_coder", "qwen_coder"),
}
WITHOUT_TOOLS = {"llama3", "deepseek_r1_distill"}


@pytest.fixture(scope="module")
def true_templates(make_environment: Callable[..., str]) -> Path:
    python = make_environment("trl-test", "-c", str(CONSTRAINTS), "trl>=1.16,<2", "peft>=0.15", upon_this=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Path(python).parents[1] / "lib" / version / "site-packages" / "trl" / "chat_templates"


@pytest.fixture
def load(true_templates: Path, model_dir: Callable[[str], Path]) -> Callable[[str], Renderer]:
    def load(name: str) -> Renderer:
        return Renderer.from_path(model_dir(TEMPLATES[name][0]), template=true_templates / f"{name}.jinja")

    return load


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_true_template_passes_the_self_test(name: str, load: Callable[[str], Renderer]) -> None:
    report = examine(load(name))
    assert report.ok, str(report)
    assert report.parser == TEMPLATES[name][1]
    skipped = {check.name for check in report.checks if check.ok is None}
    tools = {check.name for check in report.checks if "tool calls" in check.name}
    assert skipped & tools == (tools if name in WITHOUT_TOOLS else set())


def answer(step: int, *, calls: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": "" if calls else f"Answer {step}: naïve ✓"}
    if calls:
        function = {"name": "look_up", "arguments": json.dumps({"query": f'"{step}"\n<漢字>', "limit": step})}
        said["tool_calls"] = [{"id": f"call_{step:05}", "type": "function", "function": function}]
    return said


@pytest.mark.parametrize("name", TEMPLATES)
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
        said = answer(step, calls=offered is not None and step % 3 != 2)
        prompt = renderer.render(conversation, json.loads(json.dumps(messages)), offered)
        assert prompt.token_ids[: len(before)] == before
        assert prompt.extended == bool(step)
        completion = sampled_body(renderer, said, tools=offered)
        assert completion
        if prompt.opens_reasoning and "</think>" not in renderer.decode(completion):
            completion = [*renderer.encode("hm</think>"), *completion]  # the template leaves it out of a history
        parsed = renderer.parse(completion, tools=offered, prompt=prompt).to_message()
        wanted = [json.loads(c["function"]["arguments"]) for c in said.get("tool_calls", [])]
        assert [json.loads(c["function"]["arguments"]) for c in parsed.get("tool_calls", [])] == wanted
        assert (parsed["content"] or "").strip() == said["content"]
        renderer.commit(conversation, prompt, completion, parsed, turn_id=f"t{step}")
        before = [*prompt.token_ids, *completion]
        messages.append(parsed)
        for call in parsed.get("tool_calls", []):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"found {step}"})
        if not wanted:
            messages.append({"role": "user", "content": f"and {step}?"})

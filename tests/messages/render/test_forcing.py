"""Required calls as structural tags: engines' own grammar library takes what models write, and nothing else.

That half of the tests runs where `xgrammar` is installed (`pip install xgrammar`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.cli.doctor.template import sampled_body
from agentcore_rl_toolkit.messages.render import Renderer, call_format

FORCED = ["hermes", "qwen3", "qwen_coder", "llama3"]
NO_ARGUMENTS = {"type": "function", "function": {"name": "now"}}


def calling(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_00001", "type": "function", "function": function}],
    }


@pytest.mark.parametrize("family", ["glm", "harmony", "deepseek_v3", "deepseek_dsml", "pythonic"])
def test_families_whose_calls_are_no_tagged_json_are_not_forced(
    family: str, renderer_for: Callable[[str], Renderer], tools: list[dict[str, Any]]
) -> None:
    grammar = renderer_for(family).grammar
    expected = family == "pythonic"  # Llama's parser takes JSON from these models too
    assert (call_format(grammar, tools, choice="required") is not None) == expected


def test_nothing_is_forced_where_nothing_is_required(renderer_for: Callable[[str], Renderer], tools: Any) -> None:
    grammar = renderer_for("hermes").grammar
    assert call_format(grammar, tools, choice="auto") is None
    assert call_format(grammar, tools, choice="none", parallel=False) is None
    assert call_format(grammar, [], choice="required") is None


@pytest.fixture(scope="module")
def accepts(
    model_dir: Callable[[str], Path], renderer_for: Callable[[str], Renderer]
) -> Callable[[str, dict[str, Any], str], bool]:
    """``accepts(family, format, text)``: may an answer be this text, whole, under the tag?"""
    xgrammar = pytest.importorskip("xgrammar")
    from transformers import PreTrainedTokenizerFast

    compilers: dict[str, Any] = {}

    def accepts(family: str, wanted: dict[str, Any], text: str) -> bool:
        if family not in compilers:
            file = str(model_dir(family) / "tokenizer.json")
            end = renderer_for(family).tokenizer.special_tokens["eos_token"]
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token=end)
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
            compilers[family] = (xgrammar.GrammarCompiler(info), tokenizer.eos_token_id)
        compiler, eos = compilers[family]
        tag = json.dumps({"type": "structural_tag", "format": wanted})
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))
        return bool(matcher.accept_string(text) and matcher.accept_token(eos))

    return accepts


@pytest.mark.nightly
@pytest.mark.parametrize("family", FORCED)
def test_the_engines_grammar_takes_the_templates_own_calls_and_no_answer_without(
    family: str, renderer_for: Callable[[str], Renderer], tools: Any, accepts: Callable[..., bool]
) -> None:
    renderer = renderer_for(family)
    tools = [*tools, NO_ARGUMENTS]
    wanted = call_format(renderer.grammar, tools, choice="required")
    assert wanted is not None
    arguments = {"query": 'a "b"\n✓', "limit": 3, "deep": True, "tags": ["x"]}
    body = sampled_body(renderer, calling("look_up", arguments), tools=tools)
    assert body
    closer = renderer.facts.closers[0]
    whole = renderer.decode(body).removesuffix(closer).strip()
    assert accepts(family, wanted, whole), whole  # Qwen3's begins with empty reasoning
    call = whole.rpartition("</think>")[2].strip()
    assert [c.name for c in renderer.parse(renderer.encode(call), tools=tools).tool_calls] == ["look_up"]
    assert not accepts(family, wanted, "I would rather not.")
    assert not accepts(family, wanted, call.replace("look_up", "look_down"))
    between = "; " if family == "llama3" else "\n"
    two = call + between + call
    assert accepts(family, wanted, two)
    assert len(renderer.parse(renderer.encode(two), tools=tools).tool_calls) == 2
    only = call_format(renderer.grammar, tools, choice="required", parallel=False)
    assert only is not None
    assert accepts(family, only, call)
    assert not accepts(family, only, two)
    named = call_format(renderer.grammar, tools, choice="tool:now")
    assert named is not None
    assert not accepts(family, named, call)
    if family != "llama3":
        assert accepts(family, wanted, "<think>\nhm\n</think>\n\nLet me see.\n" + call)
        assert not accepts(family, wanted, call + "\nand some text")
        free = call_format(renderer.grammar, tools, choice="auto", parallel=False)
        assert free is not None
        assert accepts(family, free, "I would rather not.")
        assert accepts(family, free, "Let me see.\n" + call)
        assert not accepts(family, free, two)

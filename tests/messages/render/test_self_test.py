"""The self-test of a model: each family passes it, and calls that no parser reads fail it."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.cli.doctor.template import examine
from agentcore_rl_toolkit.messages.render import (
    HINTS,
    Renderer,
    grammar_named,
    sampled_body,
    unread_calls,
)
from agentcore_rl_toolkit.messages.wire import DIALECTS, Delta, ModelRequest, Reply, Usage

from .conftest import Family

# A template of no known family.
UNKNOWN = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}<<do {{ c.function.name }} {{ c.function.arguments | tojson }}>>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_every_family_passes_its_self_test(family: Family, renderer: Renderer) -> None:
    report = examine(renderer)
    assert {finding.level for finding in report} == {"ok"}, report
    assert renderer.grammar.name == family.parser
    assert [finding for finding in report if finding.name == "parser round trip, tool calls"]
    assert unread_calls(renderer) is None


def test_calls_that_no_parser_reads_fail_the_self_test(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "unknown.jinja").write_text(UNKNOWN)
    renderer = Renderer.from_path(model_dir("hermes"), template=tmp_path / "unknown.jinja")
    problem = unread_calls(renderer)
    assert problem is not None
    assert "<<do probe_tool" in problem
    assert problem in [finding.text for finding in examine(renderer) if finding.level == "fail"]


@pytest.mark.parametrize("grammar", ["plain", "hermes", "llama", "harmony", "muse"])
def test_a_call_in_the_form_of_another_family_is_unparsed(grammar: str, tools: list[dict[str, Any]]) -> None:
    text = "See <minimax:tool_call> and so on"
    header = {"harmony": "<|channel|>final<|message|>", "muse": " to=user<|message|>"}.get(grammar, "")
    for offered, status in ((tools, "unparsed"), (None, "none")):
        parser = grammar_named(grammar).new_parser(tools=offered)
        parser.feed(header + text)
        parser.finish()
        assert parser.status == status


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_familys_call_reaches_the_agent_whole_and_streamed(
    dialect: str, family: Family, renderer: Renderer, tools: list[dict[str, Any]]
) -> None:
    function = {"name": "look_up", "arguments": '{"query": "zqx", "limit": 3}'}
    call = {"id": "call_0000a", "type": "function", "function": function}
    body = sampled_body(renderer, {"role": "assistant", "content": "", "tool_calls": [call]}, tools=tools)
    assert body
    stream = renderer.stream(tools=tools)
    deltas = [delta for token in body for delta in stream.feed([token])] + stream.feed([], final=True)
    choice = stream.parsed()
    reply = Reply(
        id="chatcmpl-1", model="m", choices=[choice], usage=Usage(prompt_tokens=1, completion_tokens=len(body))
    )
    whole = DIALECTS[dialect].encode_reply(reply, ModelRequest(dialect=dialect, model="m"))
    request = ModelRequest(dialect=dialect, model="m", stream=True)
    encoder = DIALECTS[dialect].encoder(request, reply_id="chatcmpl-1", model="m", created=0)
    end = Delta(finish_reason=choice.finish_reason, usage=reply.usage)
    streamed = b"".join([encoder.start(), *map(encoder.feed, [*deltas, end]), encoder.finish()])
    for written in (whole, streamed):
        # InvokeModel's events carry another API's in base64.
        written = re.sub(rb'"bytes": ?"([^"]+)"', lambda match: base64.b64decode(match[1]), written)
        assert b"look_up" in written
        assert b"zqx" in written
        assert not any(mark.encode() in written for mark in HINTS)

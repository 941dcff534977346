"""`agentcore-rl harvest`: spans that Strands really makes, from a file and from CloudWatch, in both of AgentCore's modes."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from click.testing import CliRunner, Result
from google.protobuf.json_format import MessageToDict
from openai import OpenAI
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from strands import Agent, tool
from strands.models.openai import OpenAIModel

from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, UpstreamConfig
from agentcore_rl_toolkit.gateway.testing import ScriptedModel, ToolCall
from scripted_engine import ScriptedEngine
from serving import moto_server

AGENT = "shop-0123456789"
ARN = f"arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/{AGENT}"
GROUP = f"/aws/bedrock-agentcore/runtimes/{AGENT}-DEFAULT"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    found = InMemorySpanExporter()
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    provider.add_span_processor(SimpleSpanProcessor(found))
    return found


def conversations(exporter: InMemorySpanExporter, *prompts: tuple[str, str, str]) -> tuple[ReadableSpan, ...]:
    """The spans of a Strands agent with a tool that is called by (session, user, prompt)."""
    exporter.clear()

    def decide(messages: list[dict[str, Any]], _: Any) -> Any:
        return "It is 7." if messages[-1]["role"] == "tool" else [ToolCall("add", {"a": 3, "b": 4})]

    with ScriptedModel(decide) as model:
        for session, user, prompt in prompts:
            agent = Agent(
                model=OpenAIModel(client_args={"base_url": f"{model.url}/v1", "api_key": "x"}, model_id="m"),
                tools=[add],
                callback_handler=None,
                trace_attributes={"session.id": session, "user.id": user},
            )
            agent(prompt)
    return exporter.get_finished_spans()


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["harvest", *words])


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_of_spans_becomes_rows(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    spans = conversations(
        exporter,
        ("s1", "ann", "What is 3 + 4? I am ann@example.com"),
        ("s2", "ann", '{"prompt": "3 + 4", "unit": "kg"}'),
        ("s3", "bob", "What is 3 + 4? I am ann@example.com"),
        ("s1", "ann", "And again?"),
    )
    file = tmp_path / "traces.jsonl"
    file.write_text(json.dumps(MessageToDict(encode_spans(spans))) + "\n")
    out, dialogues = tmp_path / "rows.jsonl", tmp_path / "sft.jsonl"
    done = run(str(file), "--out", str(out), "--sft-out", str(dialogues))
    assert done.exit_code == 0, done.output
    assert rows(out) == [{"prompt": "What is 3 + 4? I am <EMAIL_1>"}, {"prompt": "3 + 4", "unit": "kg"}]
    assert "1 sessions had the same first message as another one" in done.output
    assert "1 later invocations of a session were left out" in done.output
    assert rows(dialogues)[0] == {
        "messages": [
            {"role": "user", "content": "What is 3 + 4? I am <EMAIL_1>"},
            {"role": "assistant", "content": "It is 7."},
        ],
        "retokenized": True,
    }
    again = run(str(file), "--out", str(out))
    assert "--force" in str(again.exception)
    assert run(str(file), "--out", str(out), "--force", "--user-attribute", "user.id").exit_code == 0


def span(session: str, prompt: str, *, user: str | None, start: int = 1) -> dict[str, Any]:
    """A span of an agent that answers each prompt with `ok`."""

    def messages(role: str, text: str) -> str:
        return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}], ensure_ascii=False)

    attributes = {
        "gen_ai.operation.name": "invoke_agent",
        "session.id": session,
        "gen_ai.input.messages": messages("user", prompt),
        "gen_ai.output.messages": messages("assistant", "ok"),
        **({"user.id": user} if user is not None else {}),
    }
    name = f"{session}-{start}"
    return {"traceId": name, "spanId": name, "startTimeUnixNano": start, "attributes": attributes}


def write_spans(path: Path, spans: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in spans))
    return path


def test_users_are_either_trained_on_or_held_out(tmp_path: Path) -> None:
    spans = [span(f"s{n}", f"What is {n} + 1?", user=f"user-{n % 8}", start=n + 1) for n in range(24)]
    file = write_spans(tmp_path / "traces.jsonl", spans)
    out, held_out = tmp_path / "rows.jsonl", tmp_path / "eval.jsonl"
    words = ("--user-attribute", "user.id")
    assert run(str(file), "--out", str(out), "--eval-out", str(held_out), *words).exit_code == 0
    users = [{int(row["prompt"].split()[2]) % 8 for row in rows(path)} for path in (out, held_out)]
    assert users[0] | users[1] == set(range(8))
    assert users[0] & users[1] == set()
    assert users[0]
    assert users[1]


def test_dialogues_are_those_of_the_training_rows(tmp_path: Path) -> None:
    spans = [span(f"s{n}", f"question {n}", user=f"u{n}", start=n) for n in range(40)]
    file = write_spans(tmp_path / "traces.jsonl", [*spans, span("s1", "yes, that one", user="u1", start=99)])
    out, held_out, dialogues = (tmp_path / f"{name}.jsonl" for name in ("rows", "eval", "sft"))
    words = ("--out", str(out), "--eval-out", str(held_out), "--sft-out", str(dialogues))
    done = run(str(file), *words, "--user-attribute", "user.id")
    assert done.exit_code == 0, done.output
    assert rows(held_out)
    prompts = [row["messages"][0]["content"] for row in rows(dialogues)]
    assert prompts == [row["prompt"] for row in rows(out)]


def test_sessions_without_the_users_attribute_are_left_out_and_counted(tmp_path: Path) -> None:
    spans = [span(f"s{n}", f"question {n}", user="alice" if n % 2 else None, start=n) for n in range(40)]
    file = write_spans(tmp_path / "traces.jsonl", [*spans, span("s0", "and then?", user="alice", start=99)])
    out, held_out = tmp_path / "rows.jsonl", tmp_path / "eval.jsonl"
    words = (str(file), "--out", str(out), "--eval-out", str(held_out), "--user-attribute")
    done = run(*words, "user.id")
    assert "20 sessions were left out: they lack the attribute of the user" in done.output
    assert sorted([len(rows(out)), len(rows(held_out))]) == [0, 20]
    empty = out if not rows(out) else held_out
    assert f"warning: {empty} is empty" in " ".join(done.output.split())
    assert "40 sessions were left out: they lack the attribute" in str(run(*words, "userid", "--force").exception)


@pytest.mark.parametrize("option", ["--eval-out", "--sft-out", "SOURCE"])
def test_no_path_is_written_twice_or_read_and_written(tmp_path: Path, option: str) -> None:
    file = write_spans(tmp_path / "traces.jsonl", [span("s", "question", user=None)])
    before = file.read_text()
    out = str(file) if option == "SOURCE" else str(tmp_path / "rows.jsonl")
    more = () if option == "SOURCE" else (option, f"{tmp_path}/./rows.jsonl")
    assert "different paths" in str(run(str(file), "--out", out, *more, "--force").exception)
    assert file.read_text() == before


def test_a_line_ends_at_a_newline_only(tmp_path: Path) -> None:
    prompt = "a\u2028b\x85c"
    file = write_spans(tmp_path / "traces.jsonl", [span(f"s{n}", f"{n} {prompt}", user=None, start=n) for n in (1, 2)])
    assert run(str(file), "--out", str(tmp_path / "rows.jsonl")).exit_code == 0
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().split("\n") if line]
    assert found == [{"prompt": f"1 {prompt}"}, {"prompt": f"2 {prompt}"}]
    whole = json.dumps([json.loads(line) for line in file.read_text().split("\n") if line], indent=2)
    file.write_text(whole, encoding="utf-8-sig")
    assert run(str(file), "--out", str(tmp_path / "rows.jsonl"), "--force").output.startswith(
        f"{tmp_path}/rows.jsonl: 2 rows"
    )


def test_values_that_are_no_records_are_left_out_and_lists_are_joined(tmp_path: Path) -> None:
    first, second = (span(f"s{n}", f"{n}", user=None, start=n) for n in (1, 2))
    file = tmp_path / "traces.jsonl"
    file.write_text(f"5\nnull\n{json.dumps(first)}\n{json.dumps([second])}\n")
    assert run(str(file), "--out", str(tmp_path / "rows.jsonl")).exit_code == 0
    assert rows(tmp_path / "rows.jsonl") == [{"prompt": "1"}, {"prompt": "2"}]


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with moto_server() as url:
        for name, value in {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_DEFAULT_REGION": "us-west-2",
        }.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("logs")
        for group, stream in ((GROUP, "spans"), ("aws/spans", "default")):
            client.create_log_group(logGroupName=group)
            client.create_log_stream(logGroupName=group, logStreamName=stream)
        yield client
        for group in (GROUP, "aws/spans"):
            client.delete_log_group(logGroupName=group)


def put(client: Any, group: str, records: list[dict[str, Any]], age_s: int = 60) -> None:
    now = int(time.time() * 1000) - 1000 * age_s
    stream = "spans" if group == GROUP else "default"
    events = [{"timestamp": now + n, "message": json.dumps(record)} for n, record in enumerate(records)]
    client.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)


def as_cloudwatch(span: ReadableSpan, *, agent: str = AGENT) -> dict[str, Any]:
    """A span as AgentCore writes it to a log group."""
    assert span.context is not None
    return {
        "resource": {
            "attributes": {
                "cloud.resource_id": f"arn:aws:bedrock-agentcore:us-west-2:1:runtime/{agent}/runtime-endpoint/DEFAULT"
            }
        },
        "traceId": f"{span.context.trace_id:032x}",
        "spanId": f"{span.context.span_id:016x}",
        "parentSpanId": f"{span.parent.span_id:016x}" if span.parent else "",
        "name": span.name,
        "startTimeUnixNano": span.start_time,
        "attributes": dict(span.attributes or {}),
        "events": [{"name": event.name, "attributes": dict(event.attributes or {})} for event in span.events],
    }


def test_an_agents_log_group_becomes_rows(tmp_path: Path, exporter: InMemorySpanExporter, logs: Any) -> None:
    spans = conversations(exporter, ("s1", "ann", "What is 3 + 4?"))
    put(logs, GROUP, [*({"note": "not a span"},), *map(as_cloudwatch, spans)])
    done = run(ARN, "--out", str(tmp_path / "rows.jsonl"))
    assert done.exit_code == 0, (done.output, done.exception)
    assert rows(tmp_path / "rows.jsonl") == [{"prompt": "What is 3 + 4?"}]


def test_an_agents_log_group_is_in_the_agents_region(
    tmp_path: Path, exporter: InMemorySpanExporter, logs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(logs, GROUP, [*map(as_cloudwatch, conversations(exporter, ("s1", "ann", "What is 3 + 4?")))])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    done = run(ARN, "--out", str(tmp_path / "rows.jsonl"))
    assert (done.exit_code, done.output.count("rows.jsonl: 1 rows")) == (0, 1), (done.output, done.exception)


def test_a_session_that_began_earlier_has_no_first_message(
    tmp_path: Path, exporter: InMemorySpanExporter, logs: Any
) -> None:
    for prompt, age_s in (("Hello", 7200), ("And then?", 60)):
        start = {"startTimeUnixNano": int((time.time() - age_s) * 10**9)}
        spans = [{**as_cloudwatch(span), **start} for span in conversations(exporter, ("s1", "ann", prompt))]
        lost = [{**span, "events": [], "traceId": f"lost-{age_s}"} for span in spans]
        put(logs, GROUP, spans + lost, age_s)
    none = run(ARN, "--since", "1h", "--out", str(tmp_path / "rows.jsonl"))
    assert "1 sessions were left out: they began before --since" in str(none.exception)
    assert "1 traces were left out: their text is missing" in str(none.exception)
    put(logs, GROUP, [*map(as_cloudwatch, conversations(exporter, ("s2", "eve", "What is 3 + 4?")))])
    done = run(ARN, "--since", "1h", "--out", str(tmp_path / "rows.jsonl"))
    assert rows(tmp_path / "rows.jsonl") == [{"prompt": "What is 3 + 4?"}]
    assert "1 sessions were left out: they began before --since" in done.output
    assert run(ARN, "--since", "3h", "--out", str(tmp_path / "all.jsonl")).exit_code == 0
    assert rows(tmp_path / "all.jsonl") == [{"prompt": "Hello"}, {"prompt": "What is 3 + 4?"}]


def test_an_agent_without_traces_is_told_what_it_needs(tmp_path: Path, logs: Any) -> None:
    put(logs, GROUP, [{"note": "not a span"}])
    error = str(run(GROUP, "--out", str(tmp_path / "rows.jsonl")).exception)
    assert "Transaction Search" in error
    assert "OpenTelemetry distribution" in error


def test_in_split_mode_texts_are_joined_to_their_spans(
    tmp_path: Path, exporter: InMemorySpanExporter, logs: Any
) -> None:
    spans = [as_cloudwatch(span) for span in conversations(exporter, ("s1", "ann", "What is 3 + 4?"))]
    others = [
        as_cloudwatch(span, agent="other-9") for span in conversations(exporter, ("s9", "eve", "Of another agent"))
    ]
    texts = []
    for span in spans:
        if span["attributes"].get("gen_ai.operation.name") == "invoke_agent":
            body = {
                "input": {"messages": [{"role": "user", "content": {"content": '[{"text": "What is 3 + 4?"}]'}}]},
                "output": {"messages": [{"role": "assistant", "content": {"message": "It is 7."}}]},
            }
            texts.append({"traceId": span["traceId"], "spanId": span["spanId"], "body": body})
        span["events"] = []
    put(logs, "aws/spans", [*spans, *others])
    put(logs, GROUP, texts)
    out, dialogues = tmp_path / "rows.jsonl", tmp_path / "sft.jsonl"
    done = run(ARN, "--out", str(out), "--sft-out", str(dialogues))
    assert done.exit_code == 0, (done.output, done.exception)
    assert rows(out) == [{"prompt": "What is 3 + 4?"}]
    assert rows(dialogues)[0]["messages"][1]["content"] == "It is 7."


def test_traces_without_texts_are_counted(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    spans = [
        as_cloudwatch(span) for span in conversations(exporter, ("s1", "a", "What is 1 + 1?"), ("s2", "b", "Lost"))
    ]
    lost = {span["traceId"] for span in spans if "Lost" in json.dumps(span["events"])}
    file = tmp_path / "traces.jsonl"
    for span in spans:
        span["events"] = [] if span["traceId"] in lost else span["events"]
    spans.append({"traceId": "of-a-health-check", "spanId": "1", "name": "GET /ping", "attributes": {}})
    file.write_text("".join(json.dumps(span) + "\n" for span in spans))
    done = run(str(file), "--out", str(tmp_path / "rows.jsonl"))
    assert "1 traces were left out: their text is missing or was cut off" in done.output
    file.write_text("".join(json.dumps(span) + "\n" for span in spans if span["traceId"] in lost))
    assert "1 traces were left out: their text is missing" in str(
        run(str(file), "--out", str(tmp_path / "none.jsonl")).exception
    )


def test_a_payload_of_json_stays_whole(tmp_path: Path) -> None:
    payload = {"text": "Translate this", "lang": "de"}
    block = json.dumps([{"text": json.dumps(payload)}])  # as Strands writes a message
    spans = []
    for n, content in enumerate((block, json.dumps(payload))):
        each = span(f"s{n}", "", user=None, start=n)
        del each["attributes"]["gen_ai.input.messages"]
        spans.append({**each, "events": [{"name": "gen_ai.user.message", "attributes": {"content": content}}]})
    file = write_spans(tmp_path / "traces.jsonl", spans)
    assert run(str(file), "--out", str(tmp_path / "rows.jsonl")).exit_code == 0
    assert rows(tmp_path / "rows.jsonl") == [payload]


@pytest.mark.parametrize(
    "broken",
    [
        {"events": 3},
        {"events": None, "attributes": [{"value": {"stringValue": "x"}}]},
        {"body": {"input": {"messages": ["x"]}}},
        {"startTimeUnixNano": "2026-01-01T00:00:00Z"},
        {"attributes": {"gen_ai.input.messages": "[broken"}},
    ],
)
def test_records_of_another_form_are_left_out(tmp_path: Path, broken: dict[str, Any]) -> None:
    found = [{"traceId": "a", "spanId": "b", **broken}, span("s", "question", user=None)]
    file = write_spans(tmp_path / "traces.jsonl", found)
    done = run(str(file), "--out", str(tmp_path / "rows.jsonl"))
    assert done.exit_code == 0, done.exception
    assert rows(tmp_path / "rows.jsonl") == [{"prompt": "question"}]


def test_the_prompt_of_a_trace_is_the_agents_and_not_that_of_a_model_call(tmp_path: Path) -> None:
    agent, call = span("s", "the user's words", user=None), span("s", "a prompt that the agent wrote", user=None)
    call = {**call, "spanId": "a model call", "attributes": {**call["attributes"], "gen_ai.operation.name": "chat"}}
    file = write_spans(tmp_path / "traces.jsonl", [call, agent])  # they started at the same time
    assert run(str(file), "--out", str(tmp_path / "rows.jsonl")).exit_code == 0
    assert rows(tmp_path / "rows.jsonl") == [{"prompt": "the user's words"}]


def test_no_question_is_trained_on_and_held_out(tmp_path: Path) -> None:
    """Scenarios with one question and several references would be in both files."""
    file = tmp_path / "data.jsonl"
    scenarios = [
        {"scenario_id": f"{n}", "turns": [{"input": f"q{n % 20}", "expected_response": f"{n}"}]} for n in range(60)
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in scenarios))
    out, held_out = tmp_path / "rows.jsonl", tmp_path / "eval.jsonl"
    done = run(str(file), "--out", str(out), "--eval-out", str(held_out))
    assert done.exit_code == 0, (done.output, done.exception)
    trained, kept = ([row["prompt"] for row in rows(path)] for path in (out, held_out))
    assert not {*trained} & {*kept}
    assert sorted(trained + kept) == sorted(f"q{n}" for n in range(20))
    assert "40 sessions had the same first message as another one" in done.output


def test_a_data_set_of_agentcore_has_references(tmp_path: Path) -> None:
    file = tmp_path / "dataset.jsonl"
    scenario = {
        "scenario_id": "a",
        "turns": [{"input": "What is 3 + 4?", "expected_response": "7"}],
        "assertions": ["is 7"],
    }
    plain = {"scenario_id": "b", "turns": [{"input": "What is 3 + 5?", "expected_response": "8"}]}
    none = {"scenario_id": "c", "turns": [{"input": "What is 3 + 6?"}]}
    file.write_text("".join(json.dumps(each) + "\n" for each in (scenario, plain, none)))
    assert run(str(file), "--out", str(tmp_path / "rows.jsonl")).exit_code == 0
    assert rows(tmp_path / "rows.jsonl") == [
        {"prompt": "What is 3 + 4?", "_reference": {"expected_response": "7", "assertions": ["is 7"]}},
        {"prompt": "What is 3 + 5?", "_reference": "8"},
        {"prompt": "What is 3 + 6?"},
    ]


def test_a_wrong_source_is_explained(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"traceId": "1"}\n{half\n')
    for source, why in (
        (str(broken), "broken.jsonl:2 is not JSON"),
        ("nowhere.jsonl", "there is no file nowhere.jsonl"),
    ):
        assert why in str(run(source, "--out", str(tmp_path / "rows.jsonl")).exception)


async def test_the_sessions_of_a_gateway_become_rows_and_sequences_of_the_sampled_tokens(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with ScriptedEngine() as engine:
        upstreams = (UpstreamConfig(url=engine.url, engine="vllm"),)
        gateway = Gateway(GatewayConfig(upstreams=upstreams, store_dir=str(store)))
        await gateway.start()
        client = GatewayClient(gateway.url)
        opened = await client.create_sessions_async([new_session_id() for _ in range(3)])
        replies: list[Any] = []
        for session, prompt in zip(opened, ("Count the lamps.", "Mail me: ada@shop.example", ""), strict=True):
            agent = OpenAI(base_url=session.base_url, api_key=session.api_key)
            messages: list[Any] = [{"role": "system", "content": "You keep a shop."}]
            messages += [{"role": "user", "content": text} for text in (prompt, "Today is Monday.") if prompt]
            ask = functools.partial(agent.chat.completions.create, model="m", messages=messages)
            replies.append((await asyncio.to_thread(ask)).choices[0].message.content)
            if "Mail" in prompt:
                messages += [{"role": "assistant", "content": replies[-1]}, {"role": "user", "content": "And then?"}]
                await asyncio.to_thread(ask)
        turns = [turn for s in (await client.fetch_async([opened[0].session_id])).values() for turn in s.turns]
        await gateway.stop()
    done = run(str(store), "--out", str(tmp_path / "rows.jsonl"), "--sft-out", str(tmp_path / "sft.jsonl"))
    assert done.exit_code == 0, done.output
    assert rows(tmp_path / "rows.jsonl") == [{"prompt": "Count the lamps."}, {"prompt": "Mail me: <EMAIL_1>"}]
    assert "1 sessions were left out: they have no message of a user" in done.output
    written = rows(tmp_path / "sft.jsonl")
    assert [row["retokenized"] for row in written] == [True, True]
    assert [row["messages"][1]["content"] for row in written] == [reply.strip() for reply in replies[:2]]

    words = ["--out", str(tmp_path / "plain.jsonl"), "--sft-out", str(tmp_path / "exact.jsonl"), "--no-redact"]
    assert "2 sequences of sampled tokens" in run(str(store), *words).output
    [turn] = turns
    first = rows(tmp_path / "exact.jsonl")[0]
    assert first["input_ids"] == [*turn.prompt_ids, *turn.completion_ids]
    assert first["assistant_masks"] == [0] * len(turn.prompt_ids) + [1] * len(turn.completion_ids)
    assert isinstance(run(str(tmp_path), "--out", str(tmp_path / "none.jsonl")).exception, ConfigError)

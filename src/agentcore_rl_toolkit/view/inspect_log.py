"""A run as a log of Inspect, written with Inspect's own types: one sample a rollout, the rollouts of a group as its epochs.

Source: inspect_ai 0.3.285, `inspect_ai.log` and `inspect_ai.event`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .._installation import require
from ..runs import Query, RunReader, TokenSequence
from ..runs.record import text_of

_STOPS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls", "content_filter": "content_filter"}
_KEPT = ("step", "phase", "outcome", "cause", "failure", "mask_reason", "advantage", "score", "session_id", "turns")
_NUMBERS = ("sampled_tokens", "trained_tokens", "branches", "staleness", "logprob_min", "gap_max", "entropy_mean")


def write_inspect_log(run: RunReader, target: Path, query: Query, *, limit: int) -> tuple[int, int]:
    """Write the first ``limit`` rollouts of a query. Returns how many are in, and how many fit. Raises: MissingExtraError."""
    log = require("inspect_ai.log", extra="inspect")
    samples = [_sample(run, row) for row in _numbered(run.rollouts(query, limit=limit))]
    rewards = [s.scores["reward"].value for s in samples if s.scores]
    mean = [log.EvalMetric(name="mean", value=sum(rewards) / len(rewards))] if rewards else []
    score = log.EvalScore(
        name="reward", scorer="reward", metrics={m.name: m for m in mean}, scored_samples=len(rewards)
    )
    times = [row["ended_s"] for row in run.rollouts(query, limit=limit) if row["ended_s"] is not None]
    ids = list(dict.fromkeys(s.id for s in samples))
    target.parent.mkdir(parents=True, exist_ok=True)
    log.write_eval_log(
        log.EvalLog(
            status="success",
            eval=log.EvalSpec(
                created=_iso(min(times, default=0.0)),
                task=run.name,
                dataset=log.EvalDataset(name=run.name, samples=len(ids), sample_ids=ids),
                model=_model(run),
                config=log.EvalConfig(epochs=max((s.epoch for s in samples), default=1)),
                metadata={"made_by": "agentcore-rl", **json.loads(json.dumps(dict(run.config()), default=str))},
            ),
            results=log.EvalResults(total_samples=len(samples), completed_samples=len(samples), scores=[score]),
            stats=log.EvalStats(started_at=_iso(min(times, default=0.0)), completed_at=_iso(max(times, default=0.0))),
            samples=samples,
        ),
        str(target),
    )
    return len(samples), run.total(query)


def _model(run: RunReader) -> str:
    name = run.config().get("model_id") or run.config().get("model") or "policy"
    return f"agentcore-rl/{Path(str(name)).name}"


def _numbered(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """With ``epoch``: Inspect wants pairs of id and epoch to differ, and groups of several phases may have one name."""
    seen: dict[str, int] = {}
    for row in rows:
        group = str(row["grp"])
        name = group if group.startswith(f"{row['phase']}/") else f"{row['phase']}/{group}"
        seen[name] = seen.get(name, 0) + 1
        yield {**row, "sample": name, "epoch": seen[name]}


def _sample(run: RunReader, row: Mapping[str, Any]) -> Any:
    log, scorer = require("inspect_ai.log", extra="inspect"), require("inspect_ai.scorer", extra="inspect")
    rollout = run.rollout(row["id"]) or {}
    detail: Mapping[str, Any] = rollout.get("detail") or {}
    messages = [_message(m, i) for i, m in enumerate(rollout.get("dialogue") or ())]
    first = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
    asked = messages[:first] or json.dumps(detail.get("payload"), default=str)
    error = None
    if row["error"] is not None:
        trace = str(detail.get("traceback") or "")
        error = log.EvalError(message=row["error"], traceback=trace, traceback_ansi=trace)
    scores = None
    if row["reward"] is not None:
        parts = detail.get("reward_parts")
        score = scorer.Score(
            value=row["reward"],
            answer=next((m.text for m in reversed(messages) if m.role == "assistant" and m.text), None),
            explanation=_explained(row),
            metadata={"parts": parts} if parts else None,
        )
        scores = {"reward": score}
    calls = sorted((c for c in detail.get("calls") or () if c["started_s"] is not None), key=lambda c: c["started_s"])
    metadata = {name: row[name] for name in (*_KEPT, *_NUMBERS) if row.get(name) is not None}
    metadata |= {"metrics": detail.get("metrics"), "fidelity": detail.get("fidelity"), "least_likely": _least(rollout)}
    ended_s = row["ended_s"]
    began_s = None if ended_s is None or row["elapsed_s"] is None else ended_s - row["elapsed_s"]
    return log.EvalSample(
        id=row["sample"],
        epoch=row["epoch"],
        input=asked,
        target=_wanted(detail.get("payload")),
        messages=messages,
        output=_output(run, messages[-1]) if messages and messages[-1].role == "assistant" else _nothing(run),
        scores=scores,
        model_usage=_usage(run, calls),
        metadata={k: v for k, v in metadata.items() if v is not None},
        events=list(_events(run, messages, first, asked, calls, detail, scores, error, began_s, ended_s)),
        error=error,
        started_at=None if began_s is None else _iso(began_s),
        completed_at=None if ended_s is None else _iso(ended_s),
        total_time=row["elapsed_s"],
        uuid=row["session_id"],
    )


def _wanted(payload: Any) -> str:
    """The input's own answer, where it has one under a usual name."""
    given = payload if isinstance(payload, Mapping) else {}
    found = (given[name] for name in ("answer", "target", "expected") if isinstance(given.get(name), str | int | float))
    return str(next(found, ""))


def _explained(row: Mapping[str, Any]) -> str:
    """What the trainer made of the reward."""
    parts = [f"outcome {row['outcome']}"]
    parts += [f"cause {row['cause']}"] if row["cause"] else []
    parts += [f"advantage {row['advantage']:.3g}"] if row["advantage"] is not None else []
    parts += [f"not trained: {row['mask_reason']}"] if row["mask_reason"] else []
    return ", ".join(parts)


def _usage(run: RunReader, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens of all model calls; empty where there was none."""
    if not calls:
        return {}
    model = require("inspect_ai.model", extra="inspect")
    read, sampled = sum(c["prompt_tokens"] for c in calls), sum(c["sampled_tokens"] for c in calls)
    return {_model(run): model.ModelUsage(input_tokens=read, output_tokens=sampled, total_tokens=read + sampled)}


def _least(rollout: Mapping[str, Any]) -> float | None:
    known: list[float] = []
    for sequence in map(TokenSequence.decoded, rollout.get("sequences") or ()):
        for value, trained in zip(sequence.logprobs or (), sequence.mask, strict=False):
            if trained and value is not None:
                known.append(value)
    return min(known, default=None)


def _events(
    run: RunReader,
    messages: Sequence[Any],
    first: int,
    asked: Any,
    calls: Sequence[Mapping[str, Any]],
    detail: Mapping[str, Any],
    scores: Mapping[str, Any] | None,
    error: Any,
    began_s: float | None,
    ended_s: float | None,
) -> Iterator[Any]:
    """The sample's start, its stages as spans, model calls and tool calls in their order, error, score.

    A model call is matched with an assistant's message by its place. Times that nobody recorded are those of what came before.
    """
    events, dataset = require("inspect_ai.event", extra="inspect"), require("inspect_ai.dataset", extra="inspect")
    model = require("inspect_ai.model", extra="inspect")
    zero_s = began_s or (calls[0]["started_s"] if calls else ended_s) or 0.0
    now_s = zero_s

    def at(seconds: float) -> dict[str, Any]:
        return {"timestamp": _time(seconds), "working_start": max(0.0, seconds - zero_s)}

    yield events.SampleInitEvent(sample=dataset.Sample(input=asked, target=""), state={}, **at(zero_s))
    stages = list((detail.get("stages") or {}).items())
    for stage, seconds in stages:
        yield events.SpanBeginEvent(id=stage, name=stage, type="stage", span_id=stage, **at(now_s))
        if stage == "run" or (stage == stages[-1][0] and "run" not in dict(stages)):
            yield from _run_events(run, messages, first, calls, now_s, at, events, model)
        now_s += seconds
        yield events.SpanEndEvent(id=stage, span_id=stage, **at(now_s))
    if not stages:
        yield from _run_events(run, messages, first, calls, now_s, at, events, model)
    if error is not None:
        yield events.ErrorEvent(error=error, **at(ended_s or now_s))
    for name, score in (scores or {}).items():
        yield events.ScoreEvent(score=score, scorer=name, **at(ended_s or now_s))


def _run_events(
    run: RunReader,
    messages: Sequence[Any],
    first: int,
    calls: Sequence[Mapping[str, Any]],
    now_s: float,
    at: Any,
    events: Any,
    model: Any,
) -> Iterator[Any]:
    number = 0
    asked_for: dict[str, Any] = {}
    for i, message in enumerate(messages[first:], first):
        if message.role == "assistant":
            call = calls[number] if number < len(calls) else None
            number += 1
            begin_s = call["started_s"] if call is not None else now_s
            now_s = (call["finished_s"] if call is not None else None) or begin_s
            yield events.ModelEvent(
                model=_model(run),
                input=list(messages[:i]),
                tools=[],
                tool_choice="auto",
                config=model.GenerateConfig(),
                output=_output(run, message, call),
                completed=_time(now_s),
                working_time=now_s - begin_s,
                **at(begin_s),
            )
            asked_for = {made.id: made for made in message.tool_calls or ()}
        elif message.role == "tool":
            made = asked_for.get(message.tool_call_id or "") or next(iter(asked_for.values()), None)
            if made is None:
                continue
            asked_for.pop(made.id, None)
            following = calls[number]["started_s"] if number < len(calls) else now_s
            yield events.ToolEvent(
                id=made.id,
                function=made.function,
                arguments=made.arguments,
                result=message.text,
                completed=_time(max(now_s, following)),
                working_time=max(0.0, following - now_s),
                **at(now_s),
            )


def _message(message: Mapping[str, Any], number: int) -> Any:
    """One of Inspect's, out of OpenAI's or Anthropic's form; images and the like are named in brackets."""
    model, tool = require("inspect_ai.model", extra="inspect"), require("inspect_ai.tool", extra="inspect")
    role, content = message.get("role"), message.get("content")
    text = content if isinstance(content, str) else text_of({"content": content})
    if role in ("system", "developer"):
        return model.ChatMessageSystem(content=text)
    if role == "tool" or message.get("type") == "function_call_output":
        given = text or str(message.get("output") or "")
        return model.ChatMessageTool(content=given, tool_call_id=message.get("tool_call_id") or message.get("call_id"))
    if role == "assistant" or message.get("type") == "function_call":
        calls = []
        for n, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") or {}
            calls.append(
                _call(tool, call.get("id") or f"call-{number}-{n}", function.get("name"), function.get("arguments"))
            )
        for n, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping) and part.get("type") == "tool_use":
                calls.append(_call(tool, part.get("id") or f"call-{number}-p{n}", part.get("name"), part.get("input")))
        if message.get("type") == "function_call":
            calls.append(
                _call(tool, message.get("call_id") or f"call-{number}", message.get("name"), message.get("arguments"))
            )
        thought = message.get("reasoning_content") or message.get("reasoning")
        whole: Any = text
        if isinstance(thought, str) and thought:
            whole = [model.ContentReasoning(reasoning=thought), model.ContentText(text=text)]
        return model.ChatMessageAssistant(content=whole, tool_calls=calls or None)
    return model.ChatMessageUser(content=text)


def _call(tool: Any, name: str, function: Any, given: Any) -> Any:
    problem, arguments = None, given
    if isinstance(given, str):
        try:
            arguments = json.loads(given or "{}")
        except (ValueError, RecursionError) as e:
            problem = f"not JSON: {e}"
    if not isinstance(arguments, dict):
        arguments = {"arguments": given}
    return tool.ToolCall(id=name, function=str(function), arguments=arguments, parse_error=problem)


def _output(run: RunReader, message: Any, call: Mapping[str, Any] | None = None) -> Any:
    model = require("inspect_ai.model", extra="inspect")
    usage = None
    if call is not None:
        read, sampled = call["prompt_tokens"], call["sampled_tokens"]
        usage = model.ModelUsage(input_tokens=read, output_tokens=sampled, total_tokens=read + sampled)
    reason = _STOPS.get(str((call or {}).get("finish_reason")), "tool_calls" if message.tool_calls else "stop")
    choice = model.ChatCompletionChoice(message=message, stop_reason=reason)
    return model.ModelOutput(model=_model(run), choices=[choice], usage=usage)


def _nothing(run: RunReader) -> Any:
    return require("inspect_ai.model", extra="inspect").ModelOutput(model=_model(run), choices=[])


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _iso(seconds: float) -> str:
    return _time(seconds).isoformat()

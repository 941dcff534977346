"""Rollouts of the word-problem agent without HTTP: what the example agent does, in one process and one batch.

For measuring a policy quickly; the quickstart's rollouts are real agents behind a real server.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from demonstrations import EXAMPLE_AGENT, Surroundings

from agentcore_rl_toolkit.policy.batch import Batch, Generation
from agentcore_rl_toolkit.policy.decoder import Decoder, DecoderShape
from agentcore_rl_toolkit.policy.sampling import SamplingParams
from agentcore_rl_toolkit.policy.word_problems import Problem, calculate, problems, reward

MAX_TURNS = 6
MAX_TOKENS = 64
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Averages over rollouts: ``reward``, and the share that used the calculator."""

    reward: float
    tool_use: float


@dataclass
class _Rollout:
    problem: Problem
    token_ids: list[int]
    reward: float = 0.0
    turns: int = 0
    calls: list[str] = field(default_factory=list)
    done: bool = False


def measure(
    model: Any,
    tokenizer: Any,
    *,
    n: int,
    seed: int = 0,
    temperature: float = 1.0,
    surroundings: Surroundings = EXAMPLE_AGENT,
) -> Measure:
    """Let the agent solve ``n`` held-out problems with a transformers model and its tokenizer."""
    batch = Batch(Decoder(DecoderShape.from_config(model.config), model.state_dict()), seed=seed)
    rollouts = []
    for task in problems("held_out", n, seed=seed):
        opening = surroundings.opening(task)
        prompt = tokenizer.apply_chat_template(opening, tools=surroundings.tools, add_generation_prompt=True)
        rollouts.append(_Rollout(task, list(prompt["input_ids"])))
    waiting = list(reversed(rollouts))
    owners: dict[int, _Rollout] = {}
    params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS)
    while waiting or batch.running:
        while waiting and len(batch.running) < batch.decoder.rows:
            rollout = waiting.pop()
            generation = Generation(prompt_ids=list(rollout.token_ids), params=params)
            owners[id(generation)] = rollout
            batch.add(generation)
        for generation in batch.step():
            rollout = owners.pop(id(generation))
            _take_turn(rollout, generation, tokenizer, surroundings)
            if not rollout.done:
                waiting.append(rollout)
    return Measure(reward=sum(r.reward for r in rollouts) / n, tool_use=sum(bool(r.calls) for r in rollouts) / n)


def _take_turn(rollout: _Rollout, generation: Generation, tokenizer: Any, around: Surroundings) -> None:
    rollout.token_ids += generation.token_ids
    rollout.turns += 1
    text = tokenizer.decode(generation.token_ids, skip_special_tokens=True)
    calls = _calls(text)
    if not calls or generation.finish_reason != "stop" or rollout.turns == MAX_TURNS:
        rollout.done = True
        rollout.reward = reward(text, rollout.problem.answer)
        return
    results = []
    for call in calls:
        expression = call.get("arguments", {}).get(around.argument_name)
        known = call.get("name") == around.tool_name and isinstance(expression, str)
        rollout.calls.append(str(expression))
        results.append(f"\n<tool_response>\n{calculate(str(expression)) if known else 'error'}\n</tool_response>")
    reply = "\n<|im_start|>user" + "".join(results) + "<|im_end|>\n<|im_start|>assistant\n"
    rollout.token_ids += tokenizer(reply)["input_ids"]


def _calls(text: str) -> list[dict[str, Any]]:
    """The calls in a reply; none where one of them cannot be read."""
    try:
        calls = [json.loads(part.partition(_CLOSE)[0]) for part in text.split(_OPEN)[1:]]
    except json.JSONDecodeError:
        return []
    readable = all(isinstance(call, dict) and isinstance(call.get("arguments"), dict) for call in calls)
    return calls if readable else []

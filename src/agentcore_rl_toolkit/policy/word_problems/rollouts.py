"""Rollouts of the word-problem agent without HTTP: what the example agent does, in one process and one batch.

For measuring a policy quickly; the quickstart's rollouts are real agents behind a real server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..batch import Batch, Generation
from ..decoder import Decoder, DecoderShape
from ..sampling import SamplingParams
from ..tokens import ChatTokenizer
from ..tool_calls import parse_tool_calls
from .demonstrations import EXAMPLE_AGENT, Surroundings
from .problems import Problem, calculate, problems, reward

MAX_TURNS = 6
MAX_TOKENS = 64


@dataclass
class LocalRollout:
    """One finished conversation as exact tokens.

    ``token_ids``, ``mask`` (1 = sampled) and ``logprobs`` (None where not sampled) have the same length.
    """

    problem: Problem
    token_ids: list[int]
    mask: list[int]
    logprobs: list[float | None]
    reward: float = 0.0
    turns: int = 0
    calls: list[str] = field(default_factory=list)
    text: str = ""
    done: bool = False


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Averages over rollouts: ``reward``, share that used the calculator, model calls, sampled tokens."""

    reward: float
    tool_use: float
    turns: float
    sampled_tokens: float


def measure(
    model: Any,
    tokenizer: ChatTokenizer,
    *,
    n: int,
    seed: int = 0,
    temperature: float = 1.0,
    surroundings: Surroundings = EXAMPLE_AGENT,
) -> Measure:
    """Average reward of a transformers model on ``n`` held-out problems."""
    decoder = Decoder(DecoderShape.from_config(model.config.to_dict()), model.state_dict())
    batch = Batch(decoder, tokenizer, seed=seed)
    return measure_batch(batch, n=n, seed=seed, temperature=temperature, surroundings=surroundings)


def measure_batch(
    batch: Batch, *, n: int, seed: int = 0, temperature: float = 1.0, surroundings: Surroundings = EXAMPLE_AGENT
) -> Measure:
    """`measure` for a policy that is already loaded for generation."""
    done = run(batch, problems("held_out", n, seed=seed), temperature=temperature, surroundings=surroundings)
    return Measure(
        reward=sum(r.reward for r in done) / n,
        tool_use=sum(bool(r.calls) for r in done) / n,
        turns=sum(r.turns for r in done) / n,
        sampled_tokens=sum(sum(r.mask) for r in done) / n,
    )


def run(
    batch: Batch, tasks: Sequence[Problem], *, temperature: float = 1.0, surroundings: Surroundings = EXAMPLE_AGENT
) -> list[LocalRollout]:
    """Let the agent solve each problem once; results in the same order."""
    tokenizer = batch.tokenizer
    rollouts = []
    for task in tasks:
        prompt = tokenizer.encode_chat(surroundings.opening(task), tools=surroundings.tools)
        rollouts.append(
            LocalRollout(problem=task, token_ids=prompt, mask=[0] * len(prompt), logprobs=[None] * len(prompt))
        )
    waiting = list(reversed(rollouts))
    owners: dict[int, LocalRollout] = {}
    params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS)
    while waiting or batch.running:
        while waiting and batch.free_rows:
            rollout = waiting.pop()
            generation = Generation(prompt_ids=list(rollout.token_ids), params=params)
            owners[id(generation)] = rollout
            batch.add(generation)
        for generation in batch.step():
            rollout = owners.pop(id(generation))
            _take_turn(rollout, generation, tokenizer, surroundings)
            if not rollout.done:
                waiting.append(rollout)
    return rollouts


def _take_turn(rollout: LocalRollout, generation: Generation, tokenizer: ChatTokenizer, around: Surroundings) -> None:
    sampled = generation.token_ids
    rollout.token_ids += sampled
    rollout.mask += [1] * len(sampled)
    rollout.logprobs += generation.logprobs
    rollout.turns += 1
    rollout.text = tokenizer.decode(sampled)
    parsed = parse_tool_calls(rollout.text)
    if not parsed.calls or generation.finish_reason != "stop" or rollout.turns == MAX_TURNS:
        rollout.done = True
        rollout.reward = reward(rollout.text, rollout.problem.answer)
        return
    results = []
    for call in parsed.calls:
        expression = call.arguments_object.get(around.argument_name)
        known = call.name == around.tool_name and isinstance(expression, str)
        rollout.calls.append(str(expression))
        results.append(f"\n<tool_response>\n{calculate(str(expression)) if known else 'error'}\n</tool_response>")
    reply = tokenizer.encode("\n<|im_start|>user" + "".join(results) + "<|im_end|>\n<|im_start|>assistant\n")
    rollout.token_ids += reply
    rollout.mask += [0] * len(reply)
    rollout.logprobs += [None] * len(reply)

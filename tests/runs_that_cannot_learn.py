"""Runs that cannot learn, each for one reason: `python tests/runs_that_cannot_learn.py FOLDER` writes them for a look."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.runs import Rollout, RunWriter, TokenSequence, TokenTexts, write_config
from agentcore_rl_toolkit.stats.intervals import interval

WEIGHTS = Path(__file__).parents[1] / "src" / "agentcore_rl_toolkit" / "policy" / "weights"
STEPS, GROUPS, SIZE, INPUTS = 12, 2, 8, 50
HELD_OUT = {"all_fail": 0.0, "all_pass": 1.0, "no_spread": 0.4}  # rewards that stay as they are
# The name of each run is that of the finding that it should show first.
SENTENCES = {
    "all_fail": "In all 16 groups of the last 8 steps, all rewards are 0 or less, so these groups teach nothing.",
    "all_pass": "In all 16 groups of the last 8 steps, all rewards are 1 or more",
    "no_spread": "In all 16 groups of the last 8 steps, all rewards are equal",
    "unparsed": "48 of 128 rollouts (38%) of the last 8 steps contain a tool call that does not parse. Their mean reward is 0.",
    "cut": "64 of 128 rollouts (50%) of the last 8 steps contain a reply that was cut off at the limit of tokens. Their",
    "one_error": "96 of 128 rollouts of the last 8 steps failed, 80 of them with \"KeyError: 'order_id'\"",
    "not_usable": "None of the 128 rollouts of the last 8 steps can be used for training",
    "opposed": "The numbers brief and thorough oppose each other",
    "entropy": "The entropy fell from",
    "updates": "The updates are too large",
    "gap": "The logprobs of engine and trainer differ by",
    "stale": "The rollouts are 5.0 weight versions old",
    "waiting": "The trainer waits for rollouts 95% of the time",
    "held_out": "but the reward on held-out inputs went from 0.40 to 0.42",
}


def write(folder: Path, kind: str, *, steps: int = STEPS, texts: TokenTexts | None = None) -> None:
    """Write a run of this kind; `healthy` is one that learns."""
    rng = random.Random(kind)
    config = {"model": "models/Qwen3-4B", "data": "data/refunds.jsonl", "agent": "shop/agent.py", "steps": 100}
    config |= {"learning_rate": 1e-6 if kind == "healthy" else 1e-5, "groups": GROUPS, "rollouts": SIZE}
    with RunWriter(folder, texts=texts) as run:
        write_config(folder, config)
        for when, step in (("before", 0), ("after", steps)):
            rate = HELD_OUT.get(kind, 0.4 if when == "before" else 0.42 if kind == "held_out" else 0.7)
            rewards = [float(n < round(rate * INPUTS)) for n in range(INPUTS)]
            for n, reward in enumerate(rng.sample(rewards, INPUTS)):
                run.rollout(_rollout(rng, kind, when, None, n, 0, reward, usable=True))
            facts = {
                "when": when,
                "version": step,
                "reward": sum(rewards) / INPUTS,
                "reward_interval": interval(rewards),
            }
            run.event("evaluated", facts | {"scored": INPUTS, "metrics": {}})
            if when == "before":
                for number in range(steps):
                    _step(run, rng, kind, number, steps)
        assert run.flush(600)
    if kind != "healthy":
        (folder / "summary.json").write_text(json.dumps({"steps": steps}))


def _step(run: RunWriter, rng: random.Random, kind: str, step: int, steps: int) -> None:
    rewards = []
    for group in range(GROUPS):
        chance = 0.25 + 0.5 * step / steps
        scores = [float(rng.random() < chance) for _ in range(SIZE)]
        if kind == "unparsed":
            scores[:3] = [0.0] * 3
        if len(set(scores)) == 1 and kind != "healthy":
            scores[0] = 1.0 - scores[0]
        fixed = {"all_fail": 0.0, "all_pass": 1.0, "no_spread": 0.25 + 0.5 * (group % 2)}
        scores = [fixed[kind]] * SIZE if kind in fixed else scores
        for place, score in enumerate(scores):
            n = group * SIZE + place
            failed = kind == "one_error" and place < 6
            run.rollout(_rollout(rng, kind, "train", step, n, place, score, failed=failed, usable=kind != "not_usable"))
            mean = sum(scores) / SIZE
            if not failed and kind != "not_usable":
                run.annotate(f"train-{step}-{n}", advantage=score - mean)
        rewards += scores
    part = step / max(1, steps - 1)
    facts: dict[str, Any] = {
        "reward": sum(rewards) / len(rewards),
        "loss": 0.01 * rng.random(),
        "grad_norm": 0.0 if kind in ("all_fail", "all_pass", "no_spread") else 0.5 + 0.2 * rng.random(),
        "kl_sampler": 0.4 if kind == "updates" else 0.002 * rng.random(),
        "clip_fraction": 0.01,
        "ratio_max": 1.4,
        "logprob_gap": 0.8 * part**3 if kind == "gap" else 1e-5,
        "entropy": 1.2 * (1 - part) + 0.01 if kind == "entropy" else 1.2 - 0.2 * part,
        "staleness_mean": 5.0 if kind == "stale" else 0.4,
        "waiting": 0.95 if kind == "waiting" else 0.4,
        "rollout_s": 19.0 if kind == "waiting" else 4.0,
        "train_s": 1.0 if kind == "waiting" else 6.0,
        "metrics": {"lookups": 1.5 + rng.random()},
    }
    run.event("step", {"step": step, **facts})


def _rollout(
    rng: random.Random,
    kind: str,
    phase: str,
    step: int | None,
    n: int,
    place: int,
    score: float,
    *,
    failed: bool = False,
    usable: bool,
) -> Rollout:
    at_s = 1_790_000_000.0 + 60 * (step or 0) + n
    # An agent that fails at the first tool result has sampled one turn, and one that reaches nothing none.
    turns = 2 if not failed else 1 if place < 5 else 0
    sampled = 20 * turns
    cut, unparsed = (
        kind == "cut" and place < 4 and phase == "train",
        kind == "unparsed" and place < 3 and phase == "train",
    )
    calls = [
        {
            "turn_id": f"{phase}-{step}-{n}-{turn}",
            "started_s": at_s + 2 * turn,
            "first_token_s": at_s + 2 * turn + 0.2,
            "finished_s": at_s + 2 * turn + 1.2,
            "prompt_tokens": 200,
            "sampled_tokens": 20,
            "finish_reason": "length" if cut and turn == 1 else "tool_calls" if turn == 0 else "stop",
            "parse_status": "unparsed" if unparsed and turn == 0 else "parsed",
        }
        for turn in range(turns)
    ]
    dialogue = [
        {"role": "system", "content": "You answer questions about orders."},
        {"role": "user", "content": f"May order {n // SIZE + 100} be refunded?"},
        {"role": "assistant", "tool_calls": [_call("a", "get_order", {"id": 100 + n}), _call("b", "get_policy", {})]},
        {"role": "tool", "tool_call_id": "a", "content": "Error: no order" if n % 5 == 0 else "paid, 12 days ago"},
        {"role": "tool", "tool_call_id": "b", "content": "Refunds within 14 days."},
        {
            "role": "assistant",
            "content": f"{'Yes' if score else 'No'}, order {n // SIZE + 100} may be refunded, says rule {n}.",
        },
    ]
    thorough = rng.random()
    ids = [rng.randrange(40, 200) for _ in range(20 + sampled)]
    tokens = TokenSequence(
        ids=ids,
        mask=[0] * 20 + [1] * sampled,
        logprobs=[None] * 20 + [-rng.expovariate(2) for _ in range(sampled)],
        trainer_logprobs=[None] * 20 + [-rng.expovariate(2) for _ in range(sampled)]
        if phase == "train" and usable and not failed
        else None,
        turn_ids=[call["turn_id"] for call in calls],
        updates=1,
    )
    mask_reason = "outcome" if failed else "stale" if not usable and phase == "train" else None
    error = ("KeyError: 'order_id'" if place < 5 else "TimeoutError: the shop did not answer") if failed else None
    return Rollout(
        session_id=f"{phase}-{step}-{n}",
        phase=phase,
        step=step,
        group=f"{phase}/{(step or 0) * GROUPS + n // SIZE}" if phase == "train" else f"{phase}/{n}",
        input_key=f"input-{n // SIZE if phase == 'train' else n}",
        place=place,
        outcome="agent_error" if failed else "ok",
        cause="agent" if failed else None,
        mask_reason=mask_reason,
        reward=None if failed else score,
        score=0.0 if failed else score,
        staleness=5 if kind == "stale" else 0,
        elapsed_s=4.5,
        ended_s=at_s + 4.5,
        error=error,
        traceback=f"Traceback (most recent call last):\n{error}" if failed else None,
        payload={"prompt": f"May order {n // SIZE + 100} be refunded?", "answer": "Yes, within 14 days."},
        metrics={"thorough": thorough + 0.3 * score, "brief": 1 - thorough + 0.3 * score}
        if kind == "opposed"
        else {"lookups": 1.0 + n % 3},
        stages={"queue": 0.2, "start": 0.1, "run": 4.0, "result": 0.1, "stop": 0.1},
        calls=calls,
        dialogue=dialogue[: 2 + turns] if failed else dialogue,
        sequences=[tokens] if turns else None,
        fidelity={"turns": turns, "sampled_tokens": sampled, "trained_tokens": sampled} if turns else None,
    )


def _call(name: str, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}


if __name__ == "__main__":
    for kind in (*SENTENCES, "healthy"):
        write(Path(sys.argv[1]) / "runs" / kind, kind, texts=TokenTexts(WEIGHTS))
        print(Path(sys.argv[1]) / "runs" / kind)

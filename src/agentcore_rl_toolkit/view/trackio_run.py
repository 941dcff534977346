"""A run in Trackio: its curves by step, and dialogues as traces.

Source: trackio 0.43, `init`, `log`, `Trace`.
"""

from __future__ import annotations

import json
from typing import Any

from .._installation import require
from ..runs import Query, RunReader
from ..runs.record import text_of

PROJECT = "agentcore-rl"
_CURVES = (
    *("reward", "reward_ok", "reward_spread", "rollouts", "usable", "sampled_tokens", "trained_tokens", "tokens_mean"),
    *("turns", "tool_calls", "staleness", "gap_max", "gap_mean", "entropy", "elapsed_s"),
)


def send_to_trackio(run: RunReader, *, traces: int, project: str = PROJECT) -> tuple[int, int]:
    """Write steps and, of each step, the ``traces`` rollouts with the lowest reward. Returns how many of both.

    Raises: MissingExtraError.
    """
    trackio = require("trackio", extra="trackio")
    config = json.loads(json.dumps(dict(run.config()), default=str))
    trackio.init(project=project, name=run.name, config=config, embed=False, auto_log_gpu=False, auto_log_cpu=False)
    events = {e["step"]: e for e in run.metrics() if e.get("event") == "step" and isinstance(e.get("step"), int)}
    steps = written = 0
    try:
        for entry in run.steps():
            trained = entry["phase"] == "train" and entry["step"] is not None
            prefix = "" if trained else f"{entry['phase']}/"
            values: dict[str, Any] = {f"{prefix}{n}": entry[n] for n in _CURVES if entry.get(n) is not None}
            values |= {f"{prefix}outcome/{n}": count for n, count in entry["outcomes"].items()}
            values |= {f"{prefix}cause/{n}": count for n, count in entry["causes"].items()}
            if trained:
                more = events.get(entry["step"], {})
                values |= {n: v for n, v in more.items() if n in ("loss", "learning_rate", "rollout_s", "train_s")}
            worst = Query(phase=entry["phase"], step=entry["step"], sort="reward")
            for place, row in enumerate(run.rollouts(worst, limit=traces)):
                messages = _messages(run, row["id"])
                if messages:
                    facts = {
                        n: row[n] for n in ("outcome", "cause", "reward", "advantage", "grp") if row[n] is not None
                    }
                    values[f"{prefix}rollouts/lowest {place + 1}"] = trackio.Trace(messages=messages, metadata=facts)
                    written += 1
            trackio.log(values, step=entry["step"])
            steps += 1
    finally:
        trackio.finish()
    return steps, written


def _messages(run: RunReader, rollout: int) -> list[dict[str, Any]]:
    """In OpenAI's form, with tool calls; parts of other forms as text."""
    found, made = run.rollout(rollout) or {}, []
    for message in found.get("dialogue") or ():
        kept = {n: message[n] for n in ("tool_calls", "tool_call_id", "name") if message.get(n)}
        content = message.get("content")
        text = content if isinstance(content, str) else text_of({"content": content})
        made.append({"role": str(message.get("role") or "assistant"), "content": text, **kept})
    return made

"""The score of the agent in `app.py`. The trainer runs it. The agent sees neither this file nor the reference."""

import re

from agentcore_rl_toolkit import answer_text


def score(payload, answer, reference, trajectory):
    """Return reward 1 if the last number of the answer is the reference, and the number of model calls as a metric."""
    numbers = re.findall(r"-?\d+", answer_text(answer).replace(",", ""))
    calls = sum(message["role"] == "assistant" for message in trajectory)
    return {"reward": float(bool(numbers) and numbers[-1] == reference), "model_calls": calls}

"""New sampling weights at Tinker, proved: what is sampled from them and the training client agree on the same tokens.

The service names weights by a path and swaps them by itself, so the folder of other engines is a path here. The rest is the same:
a few answers to a probe, the logprobs of both sides, and a run that stops where they differ.
"""

from __future__ import annotations

from typing import Any

from ...weights.engines import Sampled
from ...weights.publishing import PROBE_ANSWER_TOKENS, PROBE_ANSWERS, PROBE_PROMPT_TOKENS, check_gap
from .loop import Publish, sdk

MAX_GAP = 0.05  # the service computes in bfloat16; weights of one step ago differ by more in what was trained on


def proved(training: Any, send: Publish, *, max_gap: float = MAX_GAP) -> Publish:
    """`send`, and then the proof. ``training`` is the SDK's training client. Raises: WeightsError."""

    async def publish(path: str, version: int) -> None:
        await send(path, version)
        check_gap(await gap(training, path), version, f"Tinker as {path}", max_gap)

    return publish


async def gap(training: Any, path: str) -> float:
    """Largest difference between the logprobs of sampled tokens and those of the training client. Units: nats."""
    tinker = sdk()
    prompt = list(range(1, PROBE_PROMPT_TOKENS + 1))  # ids that any vocabulary has
    sampler = await training.create_sampling_client(path)
    params = tinker.SamplingParams(max_tokens=PROBE_ANSWER_TOKENS, temperature=1.0)
    sampled = await sampler.sample(tinker.ModelInput.from_ints(prompt), PROBE_ANSWERS, params)
    answers = [Sampled(ids=list(s.tokens), logprobs=list(s.logprobs or ())) for s in sampled.sequences]
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints([*prompt, *answer.ids][:-1]),
            loss_fn_inputs={
                "target_tokens": [*prompt, *answer.ids][1:],
                "weights": [1.0] * (len(prompt) + len(answer.ids) - 1),
            },
        )
        for answer in answers
    ]
    computed = await training.forward(data, "cross_entropy")
    found = 0.0
    for answer, output in zip(answers, computed.loss_fn_outputs, strict=True):
        own = list(output["logprobs"].data)[len(prompt) - 1 :]
        found = max([found, *(abs(a - b) for a, b in zip(answer.logprobs, own, strict=True))])
    return found

"""Imitation: cross entropy on the exact ids that good rollouts sampled, or on demonstrations."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .batch import Datum, datum_of
from .client import Loss, TrainingClient
from .settings import OptimizerSettings

Row = Mapping[str, Any]  # `input_ids` and `assistant_masks`, as in `runs.demonstrations`


async def imitate(
    training: TrainingClient,
    rows: Sequence[Row],
    *,
    optimizer: OptimizerSettings,
    epochs: int,
    batch_tokens: int,
    seed: int,
    observe: Callable[[dict[str, Any]], None],
) -> None:
    """Train on each row once per epoch, each epoch in another order.

    loss = - mean over sampled tokens of log pi(token_t). An optimizer step takes sequences of up to ``batch_tokens``.
    """
    steps = list(_steps(rows, epochs, batch_tokens, seed))
    for step, data in enumerate(steps):
        began = time.monotonic()
        now = optimizer.at(step, len(steps))
        forward = training.forward_backward(
            data, Loss(name="cross_entropy"), float(sum(datum.trained_tokens for datum in data))
        )
        passed, stepped = await asyncio.gather(forward, training.step(now))
        rate = sum(len(datum.tokens) + 1 for datum in data) / (time.monotonic() - began)
        facts = {"step": step, "steps": len(steps), "learning_rate": now.learning_rate, "computed_tokens_per_s": rate}
        observe({**facts, **passed.metrics, **stepped})


def _steps(rows: Sequence[Row], epochs: int, batch_tokens: int, seed: int) -> list[list[Datum]]:
    steps: list[list[Datum]] = []
    for epoch in range(epochs):
        order = [row for row in rows if any(row["assistant_masks"][1:])]
        random.Random(f"{seed}/{epoch}").shuffle(order)
        held = batch_tokens  # an epoch begins with a new step
        for row in order:
            ids, length = list(row["input_ids"]), len(row["input_ids"])
            if held + length > batch_tokens:
                steps.append([])
                held = 0
            inputs = {"target_tokens": ids[1:], "weights": list(row["assistant_masks"])[1:]}
            steps[-1].append(datum_of(ids[:-1], inputs))
            held += length
    return steps

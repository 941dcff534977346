"""Imitation: which tokens and rows of each epoch make a step."""

from __future__ import annotations

from typing import Any

from agentcore_rl_toolkit.backends.training.client import Loss
from agentcore_rl_toolkit.backends.training.imitation import imitate
from agentcore_rl_toolkit.backends.training.settings import OptimizerSettings

from .test_loop import ScriptedClient

ROWS = [
    {"input_ids": [1, 2, 3, 4], "assistant_masks": [1, 0, 1, 1]},
    {"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 0]},
    {"input_ids": [8, 9], "assistant_masks": [1, 0]},  # nothing predicts the first token, so nothing is trained
]


async def imitated(batch_tokens: int, epochs: int = 1, seed: int = 0) -> tuple[list[Any], list[dict[str, Any]]]:
    client, seen = ScriptedClient(), list[dict[str, Any]]()
    optimizer = OptimizerSettings(learning_rate=1e-3, warmup_steps=1)
    await imitate(
        client, ROWS, optimizer=optimizer, epochs=epochs, batch_tokens=batch_tokens, seed=seed, observe=seen.append
    )
    return client.of("forward_backward"), seen


async def test_an_epoch_in_one_step_trains_each_token_once() -> None:
    [(data, loss, tokens)], [facts] = await imitated(7)
    assert (loss, tokens) == (Loss(name="cross_entropy"), 3.0)
    found = {tuple(datum.tokens): (datum.target_tokens, datum.mask, datum.fresh) for datum in data}
    assert found == {
        (1, 2, 3): ([2, 3, 4], [0, 1, 1], [False] * 3),
        (5, 6): ([6, 7], [1, 0], [False] * 2),
    }
    assert (facts["step"], facts["steps"], facts["loss"], facts["grad_norm"]) == (0, 1, 1.5, 0.5)
    assert facts["computed_tokens_per_s"] > 0


async def test_a_step_holds_up_to_so_many_tokens_and_each_epoch_begins_another() -> None:
    steps, seen = await imitated(6, epochs=2)
    assert sorted(len(data[0].tokens) for data, *_ in steps) == [2, 2, 3, 3]
    assert [facts["learning_rate"] for facts in seen] == [5e-4, 1e-3, 1e-3, 1e-3]
    steps, _ = await imitated(100, epochs=8)
    assert [len(data) for data, *_ in steps] == [2] * 8
    assert len({tuple(data[0].tokens) for data, *_ in steps}) == 2, "another order in each epoch"

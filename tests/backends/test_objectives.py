"""The loop's loss has the gradient that docs/algorithms.md states. The other trainers' tests are in their own folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentcore_rl_toolkit.backends.training import torch_client
from agentcore_rl_toolkit.backends.training.batch import Datum
from agentcore_rl_toolkit.backends.training.client import Loss
from agentcore_rl_toolkit.backends.training.torch_client import TorchClient, TorchSettings, load_model

from .objectives import T, batch, gradient


@pytest.mark.parametrize("dual", [None, 3.0])
async def test_the_loop_takes_the_gradient_of_its_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dual: float | None
) -> None:
    rows = batch()
    logprobs_BT = rows.new.clone().requires_grad_()

    def given(model: Any, made: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        return logprobs_BT * made.mask_BT, torch.zeros_like(logprobs_BT)

    monkeypatch.setattr(torch_client, "token_logprobs", given)
    data = [
        Datum(
            tokens=[5] * T,
            target_tokens=[6] * T,
            logprobs=(rows.sampled[b] * rows.mask[b]).tolist(),
            advantages=(rows.advantages[b] * rows.mask[b]).tolist(),
            mask=rows.mask[b].int().tolist(),
            fresh=[False] * T,
        )
        for b in range(len(rows.mask))
    ]
    client = TorchClient(load_model(TorchSettings())[0], 0, TorchSettings(), run_dir=tmp_path)
    options = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28, **({"dual_clip": dual} if dual else {})}
    await client.forward_backward(data, Loss(name="ppo", options=options), float(rows.mask.sum()))
    await client.close("success")
    expected = gradient(rows, against=rows.sampled, low=0.2, high=0.28, dual=dual)
    assert (expected != 0).sum() < rows.mask.sum(), "the clip holds some tokens"
    torch.testing.assert_close(logprobs_BT.grad, expected)

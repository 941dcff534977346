"""oneDNN's products against PyTorch's own."""

from __future__ import annotations

import copy

import pytest
import torch

from agentcore_rl_toolkit.policy.linear import OneDnnLinear, suits, use_onednn

onednn = pytest.mark.skipif(not suits(256, "cpu", torch.float32), reason="PyTorch multiplies here without oneDNN")


@onednn
@pytest.mark.parametrize("frozen", [False, True], ids=["all weights", "inputs alone"])
def test_values_and_gradients_are_those_of_pytorch(frozen: bool) -> None:
    torch.manual_seed(0)
    own = torch.nn.Sequential(torch.nn.Linear(256, 300), torch.nn.SiLU(), torch.nn.Linear(300, 40, bias=False))
    by_onednn, x = copy.deepcopy(own), torch.randn(3, 50, 256)
    use_onednn(by_onednn)
    found = []
    for model in (own, by_onednn):
        model.requires_grad_(not frozen)
        inputs = x.clone().requires_grad_()
        outputs = model(inputs)
        (outputs**2).sum().backward()
        found.append([outputs, inputs.grad, *(p.grad for p in model.parameters() if not frozen)])
    assert [type(layer) for layer in by_onednn] == [OneDnnLinear, torch.nn.SiLU, OneDnnLinear]
    for pytorchs, onednns in zip(*found, strict=True):
        torch.testing.assert_close(onednns, pytorchs, atol=1e-3, rtol=1e-4)

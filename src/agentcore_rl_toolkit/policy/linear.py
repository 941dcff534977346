"""Products with weight matrices on x86 CPUs by oneDNN.

PyTorch multiplies float32 by Intel's MKL, which uses half of an AMD core's width. oneDNN needs half the time there
(`benchmarks/engine.py`); Intel's CPUs were not measured. Weights that do not change for many calls are kept in oneDNN's own
order, which saves a third at small batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_SMALLEST = 256  # columns; below, oneDNN's 10 microseconds a call are more than it saves


def suits(columns: int, device: str, dtype: torch.dtype) -> bool:
    """Return True if oneDNN multiplies weights of this kind, and they are large enough for it."""
    if device != "cpu" or columns < _SMALLEST or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear` without gradients. The weight may be in oneDNN's order."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def products(columns: int, device: str, dtype: torch.dtype) -> tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]:
    """Return two functions for inference: the first reorders a weight once, the second multiplies by it."""
    if suits(columns, device, dtype):
        return torch.ops.mkldnn._reorder_linear_weight, linear
    return lambda weight: weight, nn.functional.linear


class _Product(torch.autograd.Function):
    """`linear` with its gradients. Shapes: x (..., K), weight (N, K), bias (N,) -> (..., N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        [upper], (x, weight), (of_x, of_weight, of_bias) = gradients, ctx.saved_tensors, ctx.needs_input_grad
        flat = upper.flatten(0, -2)
        return (
            linear(upper, weight.t()) if of_x else None,
            linear(flat.t(), x.flatten(0, -2).t()) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )


class OneDnnLinear(nn.Linear):
    """A linear layer whose products are oneDNN's, forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]


def use_onednn(model: nn.Module) -> None:
    """Let a model's linear layers multiply with oneDNN if `suits` is true for them."""
    for layer in model.modules():
        if type(layer) is nn.Linear and suits(layer.in_features, layer.weight.device.type, layer.weight.dtype):
            layer.__class__ = OneDnnLinear

"""Checksums of a few tensors: an engine's as it has them, and those of the checkpoint that it was given.

They are equal bit for bit if the engine has these tensors of this version, whatever rounding does to logprobs. The built-in
engine reports them; vLLM and SGLang have no route for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import WeightsError
from .checkpoint import WEIGHTS_FILE

if TYPE_CHECKING:
    import torch


def checksum(tensor: torch.Tensor, dtype: str) -> int:
    """Return the CRC-32 of a tensor's bytes in this type of numbers, such as "bfloat16"."""
    import torch

    values = tensor.detach().to("cpu", getattr(torch, dtype)).contiguous()
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes())


def check_sums(found: Mapping[str, int], dtype: str, folder: Path, where: str) -> None:
    """Compare an engine's checksums with the tensors in a checkpoint's folder. Raises: WeightsError if one differs."""
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS_FILE, framework="pt") as stored:
        for name, given in found.items():
            if given != checksum(stored.get_tensor(name), dtype):
                raise WeightsError(f"the weights did not arrive: {where} has another {name} than {folder}")

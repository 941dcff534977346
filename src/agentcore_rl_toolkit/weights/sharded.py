"""Models whose parameters are split over the processes of a run: FSDP (both kinds) and DeepSpeed's ZeRO-3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")  # parts of names that wrappers add


def is_sharded(model: Any) -> bool:
    """Return True if a process has only its part of the parameters."""
    return _fsdp1(model) or any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters())


@contextlib.contextmanager
def whole(model: Any) -> Iterator[None]:
    """Bring the parameters together while the block runs. Every process of the run enters, and reads the same parameters.

    The parameters of FSDP2 are brought together one by one, by `full_tensor`.
    """
    split = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if split:
        from deepspeed.zero import GatheredParameters

        with GatheredParameters(split):
            yield
    elif _fsdp1(model):
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            yield
    else:
        yield


def _fsdp1(model: Any) -> bool:
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def plain_name(name: str) -> str:
    """Return the name of a parameter without the parts that wrappers add."""
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name

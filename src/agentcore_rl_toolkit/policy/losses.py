"""The losses of a policy, token by token. The training loop and the local training service compute both with these.

For a sampled token t with logprob l_t, the sampler's logprob o_t, advantage A_t and ratio r_t = exp(l_t - o_t)::

    cross_entropy         - l_t
    importance_sampling   - r_t A_t
    ppo                   - min(r_t A_t, clip(r_t, low, high) A_t)
    cispo                 - clip(r_t, low, high) A_t l_t        (the clipped ratio is a constant)

With the option ``dual_clip`` = c, the ppo loss of a token with A_t < 0 is at most - c A_t (arXiv:1912.09729).

Sources: names, options and the default clip of 0.8 to 1.2 are Tinker's (tinker-docs.thinkingmachines.ai, "Losses"); PPO,
arXiv:1707.06347; CISPO, arXiv:2506.13585.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")
OPTIONS = ("clip_low_threshold", "clip_high_threshold", "dual_clip")
CLIP = (0.8, 1.2)


def bounds_of(options: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lower and upper bound of the ratio."""
    low, high = CLIP
    return float(options.get("clip_low_threshold", low)), float(options.get("clip_high_threshold", high))


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if there is no loss or option of this name."""
    if name not in LOSSES:
        raise ConfigError(f"loss {name!r} is unknown; available: {', '.join(LOSSES)}")
    if unknown := [option for option in options if option not in OPTIONS]:
        raise ConfigError(f"loss option {unknown[0]!r} is unknown; available: {', '.join(OPTIONS)}")


def token_losses(
    name: str, logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, options: Mapping[str, Any]
) -> torch.Tensor:
    """Return the loss of each token. It is 0 for a token with advantage 0, whatever its logprobs are.

    Shapes: all equal. Raises: as `check_options`.
    """
    import torch  # here: metrics need the bounds only

    check_options(name, options)
    if name == "cross_entropy":
        return -logprobs
    # The recorded logprob of a context token means nothing, and the exponential of the difference could overflow.
    ratios = torch.where(advantages != 0, logprobs - sampled, 0.0).exp()
    clipped = ratios.clamp(*bounds_of(options))
    if name == "importance_sampling":
        return -(ratios * advantages)
    if name == "ppo":
        objective = torch.minimum(ratios * advantages, clipped * advantages)
        if (bound := options.get("dual_clip")) is not None:
            objective = torch.where(advantages < 0, torch.maximum(objective, bound * advantages), objective)
        return -objective
    return -(clipped.detach() * advantages * logprobs)  # cispo

"""What cannot work in the settings of a slime run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...errors import ConfigError

_MODEL_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Options of slime that this backend sets, or that cannot work with rollouts of remote agents, and why.
_REFUSED_FLAGS = {
    "--group-rm": "the agent computes the reward of each rollout",
    "--rollout-top-p": "slime needs the kept vocabulary of every token then, which agents' calls do not carry",
    "--custom-generate-function-path": "rollouts would not reach the agents",
    "--custom-config-path": "the rollout settings would not reach slime",
    "--custom-reward-post-process-path": "slime's own counts masked rollouts as reward 0",
    "--rollout-function-path": "slime's own fails on a step in which only some rollouts fork; see `mode`",
}


def check_together(runner: Any) -> None:
    """The settings of a `SlimeRunner` that depend on each other. Raises: ConfigError naming the setting."""
    if not _MODEL_TYPE.fullmatch(runner.model_type):
        raise ConfigError(f"model_type {runner.model_type!r} must be a name like those under slime/scripts/models")
    check_flags(runner.extra_flags)
    if (runner.over_sampling_batch_size or runner.rollout_batch_size) < runner.rollout_batch_size:
        raise ConfigError(
            f"over_sampling_batch_size={runner.over_sampling_batch_size} is less than "
            f"rollout_batch_size={runner.rollout_batch_size}"
        )
    if runner.num_gpus % runner.tp_size or runner.num_gpus % runner.rollout_gpus_per_engine:
        raise ConfigError(
            f"num_gpus={runner.num_gpus} must be divisible by tp_size={runner.tp_size} and "
            f"rollout_gpus_per_engine={runner.rollout_gpus_per_engine}"
        )
    if runner.mode == "sync" and runner.rollout_num_gpus is not None:
        raise ConfigError("rollout_num_gpus needs mode async or fully_async: sync shares num_gpus with training")
    if runner.rollout_gpus % runner.rollout_gpus_per_engine:
        raise ConfigError(
            f"rollout_num_gpus={runner.rollout_gpus} must be divisible by rollout_gpus_per_engine="
            f"{runner.rollout_gpus_per_engine}"
        )


def check_flags(flags: Sequence[str]) -> None:
    for i, flag in enumerate(flags):
        name, given, value = flag.partition("=")
        if name == "--rollout-top-p" and (value if given else next(iter(flags[i + 1 :]), "")) in ("1", "1.0"):
            continue
        if name in _REFUSED_FLAGS:
            raise ConfigError(f"extra_flags: {name} cannot work here: {_REFUSED_FLAGS[name]}")

"""``python -m agentcore_rl_toolkit.backends.rllm.main key=value ...``: rLLM's unified trainer over AgentCore.

Takes rLLM's own hydra overrides. The data set is the one named by RLLM_DATASET in rLLM's registry (`backends.gsm8k`
puts it there).
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ...errors import ConfigError, MissingExtraError


def backend_of(arguments: list[str]) -> str:
    """The trainer named by ``rllm/backend=``. Raises: ConfigError when it is not verl or tinker."""
    named = [a.partition("=")[2] for a in arguments if a.startswith("rllm/backend=")]
    backend = named[-1] if named else "verl"
    if backend not in ("verl", "tinker"):
        raise ConfigError(f"rllm/backend={backend}: only verl and tinker run AgentCore agents")
    return backend


def main() -> None:
    """Compose rLLM's configuration and train."""
    backend = backend_of(sys.argv[1:])
    name = os.environ.get("RLLM_DATASET", "gsm8k_agentcore")
    try:
        import hydra
        from rllm.data.dataset import DatasetRegistry
    except ModuleNotFoundError as e:
        raise MissingExtraError(
            f"rLLM backend: {e.name!r} is missing. rLLM is installed from its repository: "
            "pip install 'rllm @ git+https://github.com/rllm-org/rllm'"
        ) from e

    def run(config: Any) -> None:
        splits = {split: DatasetRegistry.load_dataset(name, split) for split in ("train", "test")}
        if splits["train"] is None:
            raise ConfigError(
                f"rLLM's registry has no data set {name!r}; make it with "
                "python -m agentcore_rl_toolkit.backends.gsm8k train.jsonl rllm:train"
            )
        from rllm.trainer import AgentTrainer

        AgentTrainer(backend=backend, config=config, train_dataset=splits["train"], val_dataset=splits["test"]).train()

    hydra.main(config_path="pkg://rllm.trainer.config", config_name="unified", version_base=None)(run)()


if __name__ == "__main__":
    main()

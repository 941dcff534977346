"""``python -m agentcore_rl_toolkit.backends.rllm.main key=value ...``: rLLM's unified trainer over AgentCore.

Takes rLLM's own hydra overrides. RLLM_DATASET is a data set in rLLM's registry
(`examples/strands_math_agent/prepare.py` registers GSM8K). RLLM_RECORD_DIR names the folder that keeps the rollouts for
`agentcore-rl view`. RLLM_MAX_MEAN_LOGPROB_GAP is the largest mean difference, in nats, between the logprobs of engine and trainer
with which the run continues; "none" is no limit.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ...errors import ConfigError, MissingExtraError
from ..settings import fault_of_the_command
from .recording import Recorder, attach
from .settings import GAP_VARIABLE, mean_gap

MODEL_PATHS = {"verl": "actor_rollout_ref.model.path", "tinker": "model.name"}


def backend_of(arguments: list[str]) -> str:
    """Return the trainer in ``rllm/backend=``. Raises: ConfigError when it is not verl or tinker."""
    named = [a.partition("=")[2] for a in arguments if a.startswith("rllm/backend=")]
    backend = named[-1] if named else "verl"
    if backend not in ("verl", "tinker"):
        raise ConfigError(f"rllm/backend={backend}: only verl and tinker run AgentCore agents")
    return backend


def recorder_of(config: Any, backend: str) -> Recorder:
    from omegaconf import OmegaConf

    def section(name: str) -> dict[str, Any]:
        found = OmegaConf.select(config, name)
        return {} if found is None else dict(OmegaConf.to_container(found, resolve=True))

    named = OmegaConf.select(config, "rllm.trainer.experiment_name") or "rllm"
    folder = os.environ.get("RLLM_RECORD_DIR") or f"runs/{named}"
    model = OmegaConf.select(config, MODEL_PATHS[backend])
    kept = (
        "algorithm",
        "async_training",
        "compact_filtering",
        "data",
        "remote_runtime",
        "rollout",
        "trainer",
        "workflow",
    )
    return attach(
        folder=str(Path(folder).absolute()),
        config={"trainer": "rllm", "backend": backend, "model": model, **{n: section(f"rllm.{n}") for n in kept}},
        tokenizer=None if model is None else str(model),
        filtering=section("rllm.compact_filtering"),
        asynchronous=bool(OmegaConf.select(config, "rllm.async_training.enable")),
        max_mean_gap=mean_gap(os.environ.get(GAP_VARIABLE)),
    )


def main() -> None:
    with fault_of_the_command():
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
        with fault_of_the_command():  # hydra would end the process with 1
            splits = {split: DatasetRegistry.load_dataset(name, split) for split in ("train", "test")}
            if splits["train"] is None:
                raise ConfigError(
                    f"rLLM's registry has no data set {name!r}; make it with "
                    "python examples/strands_math_agent/prepare.py train.jsonl rllm:train"
                )
            recorder = recorder_of(config, backend)
        from rllm.trainer import AgentTrainer

        # rLLM passes unknown settings on to its trainer, which is a separate process for verl.
        datasets = {"train_dataset": splits["train"], "val_dataset": splits["test"]}
        AgentTrainer(backend=backend, config=config, **datasets, agentcore_recorder=recorder).train()

    hydra.main(config_path="pkg://rllm.trainer.config", config_name="unified", version_base=None)(run)()


if __name__ == "__main__":
    main()

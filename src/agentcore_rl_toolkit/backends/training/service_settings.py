"""The settings of a run over a training service."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ...errors import ConfigError
from ..collection.groups import trained_temperature
from ..service import ServiceSettings
from ..settings import Positive, SettingsGroup
from .publishing import MAX_GAP
from .settings import LoopSettings


class DataSettings(SettingsGroup):
    """The model and the data. ``base_model`` is the service's name of the model.

    ``model_dir`` is a local folder with that model's tokenizer and chat template (no weights). The rows are shuffled again
    after each pass. ``eval_data_path`` has rows that are never trained on. ``output_dir`` keeps the metrics and checkpoints; a
    further run with the same folder continues from the last checkpoint. ``max_weights_gap`` limits the difference between
    the sampler's logprobs and those of the weights in training.
    """

    base_model: str
    model_dir: Path
    data_path: Path
    eval_data_path: Path | None = None
    output_dir: Path = Path("runs/service")
    max_weights_gap: Positive = MAX_GAP


class ServiceTrainingConfig(ServiceSettings, LoopSettings):
    """The loop's settings, on top of those of every run's rollouts. Raises: ConfigError."""

    # Earlier names of settings that all trainers share.
    ALIASES: ClassVar[Mapping[str, str]] = {
        **LoopSettings.ALIASES,
        "groups_per_step": "groups",
        "group_size": "rollouts",
        "loss_config": "loss_options",
    }
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"steps": 100, "loss": "importance_sampling", "max_tokens": 32768}

    data: DataSettings

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if (temperature := trained_temperature(self.selection.sampling_params)) != 1.0:
            raise ConfigError(
                f"sampling_params.temperature is {temperature:g}, and training services compute their losses at temperature 1: "
                "leave it at 1, or train with the loop, TRL, verl or slime"
            )

    def services(self) -> ServiceSettings:
        """Return the settings for `RolloutService.open`. Its gateway renders prompts with `model_dir`."""
        return self.replace(gateway_model=str(self.data.model_dir), record_dir=None)

    def needs(self) -> list[str]:
        folder = self.data.model_dir
        if self.gateway.gateway_url is None and not (folder / "tokenizer_config.json").is_file():
            return [f"tokenizer and chat template in {folder} (model_dir)"]
        return []

"""Settings of verl runs: the published guide's keys, and the resulting hydra overrides."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import Field

from ...errors import ConfigError
from ...weights.arrival import MAX_MEAN_GAP
from ..collection.groups import trained_temperature
from ..service import ServiceSettings
from ..settings import (
    Plan,
    Positive,
    SettingsGroup,
    hydra_value,
    planned,
    read_settings,
    with_environment,
)

# verl wants this or a micro batch size; episodes differ too much in length for a fixed number of rows.
DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz"
PACKAGE = "agentcore_rl_toolkit.backends.verl"
PUBLISHED_PREFIX = "actor_rollout_ref.rollout.agentcore."
OUR_PREFIX = "agentcore."

TEMPERATURE_KEY = "actor_rollout_ref.rollout.temperature"  # verl samples and computes at this temperature
ESTIMATOR_KEY, ESTIMATOR = "algorithm.adv_estimator", "agentcore"  # advantages computed by this project, one per token
ADMIN_KEY = "AGENTCORE_RL_GATEWAY_ADMIN_KEY"

# Required overrides (key, value, reason): without them, rollouts do not reach us, or their data are wrong.
_OWN = "this backend sets it; to use another one, start verl's own main"
REQUIRED: tuple[tuple[str, str, str], ...] = (
    ("trainer.use_v1", "true", "masked rollouts need the V1 trainer, which accepts sessions without rows"),
    ("transfer_queue.enable", "true", "the V1 trainer passes samples through TransferQueue"),
    ("actor_rollout_ref.rollout.calculate_log_probs", "true", "importance ratios need the sampled logprobs"),
    (
        "actor_rollout_ref.rollout.logprobs_mode",
        "processed_logprobs",
        "verl computes its own at the rollouts' temperature",
    ),
    ("+actor_rollout_ref.rollout.agent.agent_loop_manager_class", f"{PACKAGE}.manager.AgentCoreManager", _OWN),
    ("data.custom_cls.path", f"pkg://{PACKAGE}.dataset", _OWN),
    ("data.custom_cls.name", "PayloadDataset", _OWN),
)
DEFAULTS: tuple[tuple[str, str], ...] = (
    # Without it, a failed prompt takes a place in the batch, and a step with only failed prompts ends the run.
    ("trainer.v1.sampler.sync_refill_failed_groups", "true"),
    ("algorithm.adv_estimator", "grpo"),
    # Engine and trainer differ by rounding, and rollouts of asynchronous modes are from older weights.
    ("algorithm.rollout_correction.rollout_is", "token"),
    ("algorithm.rollout_correction.rollout_is_threshold", "2.0"),
    ("actor_rollout_ref.rollout.name", "vllm"),
    ("actor_rollout_ref.rollout.n", "8"),
)


class VerlSettings(SettingsGroup):
    """The settings that only verl has. `gateway_cumulative_token_mode` and `gateway_renderer_model_family` have no effect.

    The run ends when the recorded logprobs of a step and verl's own differ by more than `max_mean_logprob_gap` nats on average
    (None: never).
    """

    max_mean_logprob_gap: Positive | None = MAX_MEAN_GAP
    gateway_cumulative_token_mode: bool = False
    gateway_renderer_model_family: str = "auto"


class AgentCoreConfig(ServiceSettings):
    """The ``agentcore`` section of a verl run. The published guide's names are accepted.

    The gateway renders with `gateway_model`, the trained model's tokenizer unless given, and samples through verl's own client.
    The published `gateway_store` "memory" keeps captured turns in a temporary folder. verl serves a model under its path, or
    under `model_id`.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "reqs_per_sec": "tps_limit",
        "max_rollout_time": "rollout_timeout_s",
        "max_submit_time": "submit_timeout_s",
    }
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "exp_id": "verl",
        "model_id": None,
        "rollout_timeout_s": 1800.0,
        "max_pool_connections": 10,
        "max_concurrent": 256,
        "gateway_port": 9090,
    }

    verl: VerlSettings = Field(default_factory=VerlSettings)

    def service(self, model_path: str) -> ServiceSettings:
        store = None if self.gateway.gateway_store == "memory" else self.gateway.gateway_store
        return self.replace(model_id=self.agent.model_id or model_path, gateway_store=store)

    @classmethod
    def of(cls, config: Any) -> AgentCoreConfig:
        """Read the `agentcore` section of verl's composed configuration. Raises: ConfigError."""
        from omegaconf import OmegaConf

        section = config.get("agentcore")
        if section is None:
            raise ConfigError(f"the configuration has no `agentcore` section; start verl with python -m {PACKAGE}.main")
        values: Mapping[str, Any] = OmegaConf.to_container(section, resolve=True)
        return cls.from_values(with_environment(values), where="agentcore")


class VerlConfig(SettingsGroup):
    """A verl run as a file: `agentcore` for us, `overrides` or `args` for verl (hydra keys)."""

    agentcore: Mapping[str, Any]
    overrides: Mapping[str, Any] = Field(default_factory=dict)
    words: tuple[str, ...] = ()  # further arguments of the command line, as they were given

    @classmethod
    def from_file(cls, path: str | Path) -> VerlConfig:
        """Read a file; AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET fill its `agentcore` section."""
        values = read_settings(path)
        if "args" in values:
            values["overrides"] = {**values.get("overrides", {}), **values.pop("args")}
        return cls.from_values(values, where=str(path))

    def with_args(self, words: Sequence[str]) -> VerlConfig:
        return self.replace(words=(*self.words, *words))

    def plan(self) -> Plan:
        return plan([*(f"{k}={hydra_value(v)}" for k, v in self.overrides.items()), *self.words], self.agentcore)


def tokenizer_folder(model: str) -> str:
    """Return a folder with the model's tokenizer and chat template. Those of a model on the hub are in its cache or fetched."""
    if Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download

    return snapshot_download(model, allow_patterns=["*.json", "*.jinja", "*.model", "*.txt"], ignore_patterns=["*/*"])


def translate(
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    agentcore: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[AgentCoreConfig, list[str]]:
    """Split the arguments of our `main` into our settings and the arguments of verl's own main.

    Keys under ``actor_rollout_ref.rollout.agentcore.`` (as the published guide writes them) or ``agentcore.`` are ours, besides
    those of ``agentcore``. verl gets them in a top-level section, because it turns its rollout section into a dataclass.
    Raises: ConfigError on an unknown key of ours, a missing one, or an override that contradicts what the backend
    needs.
    """
    ours = dict(agentcore)
    theirs: list[str] = []
    for argument in arguments:
        key, _, value = argument.lstrip("+").partition("=")
        name = next((key[len(p) :] for p in (PUBLISHED_PREFIX, OUR_PREFIX) if key.startswith(p)), None)
        if name is None:
            theirs.append(argument)
        else:
            ours[name] = _value(value)
    config = AgentCoreConfig.from_values(with_environment(ours, environ), where="agentcore")
    given = {a.lstrip("+~").partition("=")[0]: a.partition("=")[2] for a in theirs}
    for key, value, why in REQUIRED:
        plain = key.lstrip("+")
        if given.get(plain, value).lower() != value.lower():
            raise ConfigError(f"{plain}={given[plain]} cannot work here: {why}")
        if plain not in given:
            theirs.append(f"{key}={value}")
    temperature = given.get(TEMPERATURE_KEY, "1")  # a text, which may be an interpolation
    if not temperature.strip("0."):
        trained_temperature({"temperature": 0})
    config.signals.check_temperature(1 if re.fullmatch(r"1(\.0*)?", temperature) else temperature, TEMPERATURE_KEY)
    if config.signals.per_token:
        if given.setdefault(ESTIMATOR_KEY, ESTIMATOR) != ESTIMATOR:
            raise ConfigError(
                f"{ESTIMATOR_KEY} gives each rollout one advantage: leave it out with credit or teacher_url"
            )
        theirs.append(f"{ESTIMATOR_KEY}={ESTIMATOR}")
    theirs += [f"{k}={v}" for k, v in DEFAULTS if k not in given]
    if not any("ppo_micro_batch_size" in key or key == DYNAMIC for key in given):
        theirs.append(f"{DYNAMIC}=true")
    if config.agent.record_dir is None:
        config = config.replace(record_dir=str(Path("runs", config.exp_id).absolute()))
    theirs += [
        f"+agentcore.{name}={hydra_value(value)}" for name, value in config.shown().items() if value not in (None, ())
    ]
    return config, theirs


def plan(arguments: Sequence[str], agentcore: Mapping[str, Any] = MappingProxyType({})) -> Plan:
    config, theirs = translate(arguments, os.environ, agentcore)
    facts = planned(config)
    given = dict(a.lstrip("+").partition("=")[::2] for a in theirs)
    packages = (("verl", "verl==0.9.1"), ("transfer_queue", "TransferQueue"), ("ray", "ray"))
    needs = [f"pip install {p}" for m, p in packages if not importlib.util.find_spec(m)]
    engine = given["actor_rollout_ref.rollout.name"]
    if not importlib.util.find_spec(engine):
        needs.append(f"the engine {engine} (verl[{engine}])")
    if "actor_rollout_ref.model.path" not in given:
        needs.append("actor_rollout_ref.model.path=FOLDER_OR_HUB_ID")
    if "data.train_files" not in given:
        needs.append("data.train_files=FILE.jsonl or .parquet")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *theirs]
    # Never on the command line, where every user of the machine can read it.
    environment = {ADMIN_KEY: config.gateway_admin_key} if config.gateway_admin_key else {}
    return Plan(backend="verl", facts=facts, command=command, environment=environment, needs=needs)


def _value(text: str) -> Any:
    """Convert a hydra value of our settings: to None, a list of texts, or a text that the setting's type converts."""
    if text.startswith("["):
        return [_unquoted(part.strip()) for part in text.strip("[]").split(",")]
    return None if text.lower() in ("null", "none", "") else _unquoted(text)


def _unquoted(text: str) -> str:
    """Undo what `hydra_value` does to a text."""
    if (found := re.fullmatch(r"(['\"])(.*)\1", text, re.DOTALL)) is None:
        return text
    quote, inside = found.groups()
    return re.sub(rf"(\\+)({quote}|\Z)", lambda m: len(m[1]) // 2 * "\\" + m[2], inside)

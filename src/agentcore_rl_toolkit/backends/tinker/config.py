"""Settings of a Tinker run from the command line, and the plan they stand for."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path

from ..._installation import install_command
from ...errors import ConfigError
from ...gateway.engines.tinker import KEY_ENV, service_url
from ..data import read_rows
from ..service import ServiceSettings, gateway_place
from ..settings import Plan, check_numbers, check_run, from_mapping, read_settings, with_environment
from .loop import TinkerConfig
from .proof import MAX_GAP


@dataclass(frozen=True, kw_only=True)
class TinkerRunConfig(TinkerConfig):
    """Everything a run needs, on top of the loop's own settings. Read from YAML, TOML or JSON with `from_file`.

    `base_model` is the service's name of the model; `model_dir` a local folder with that model's tokenizer and chat template
    (no weights). `service_url` None is the SDK's own choice. The run starts a gateway at `gateway_host`, which agents must
    reach (as `gateway_public_url`, where that differs), unless `gateway_url` names one; `gateways` starts several, and several
    URLs are a list or one text with commas between. `steps` steps of `groups_per_step`
    inputs, `group_size` rollouts each; the rows are shuffled anew every time all were used. `output_dir` keeps the
    metrics and, with `checkpoint_every`, what a further run with the same folder goes on from.
    Raises: ConfigError.
    """

    agent_runtime_arn: str
    s3_bucket: str
    base_model: str
    model_dir: Path
    data_path: Path
    output_dir: Path = Path("runs/tinker")
    service_url: str | None = None
    rank: int = 32
    seed: int = 0
    steps: int = 100
    groups_per_step: int = 8
    group_size: int = 8
    context_tokens: int | None = None
    model_id: str = "policy"
    endpoint_url: str | None = None
    tps_limit: int = 25
    max_weights_gap: float = MAX_GAP
    gateway_url: str | tuple[str, ...] | None = None
    gateway_public_url: str | tuple[str, ...] | None = None
    gateway_admin_key: str | None = field(default=None, repr=False)
    gateway_host: str = "0.0.0.0"
    gateway_port: int = 0
    gateways: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2:
            raise ConfigError(f"a group needs at least 2 rollouts to compare, got group_size={self.group_size}")
        counts = ("gateways", "steps", "groups_per_step", "rank", "context_tokens", "max_tokens")
        check_numbers(self, positive=("tps_limit", "max_weights_gap"), counts=counts, ports=("gateway_port",))

    @classmethod
    def from_file(cls, path: str | Path) -> TinkerRunConfig:
        """Read a file; AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET fill what it leaves out."""
        return from_mapping(cls, with_environment(read_settings(path)), where=str(path))

    @property
    def url(self) -> str:
        return (self.service_url or service_url()).rstrip("/")

    def services(self) -> ServiceSettings:
        """What `RolloutService.open` needs."""
        return ServiceSettings(
            agent_runtime_arn=self.agent_runtime_arn,
            s3_bucket=self.s3_bucket,
            exp_id=self.exp_id,
            model_id=self.model_id,
            tps_limit=self.tps_limit,
            endpoint_url=self.endpoint_url,
            gateway_url=self.gateway_url,
            gateway_public_url=self.gateway_public_url,
            gateway_admin_key=self.gateway_admin_key,
            gateway_host=self.gateway_host,
            gateway_port=self.gateway_port,
            gateways=self.gateways,
        )

    def gateway_options(self) -> list[str]:
        """Further options of the gateway's command line."""
        window = [] if self.context_tokens is None else ["--context-tokens", str(self.context_tokens)]
        return ["--model", str(self.model_dir), *window]

    def plan(self) -> Plan:
        """What the run would do. Raises: ConfigError when the data cannot be read."""
        check_run(agent_runtime_arn=self.agent_runtime_arn, s3_bucket=self.s3_bucket, exp_id=self.exp_id)
        started = f"started here, on {self.gateway_host}, with the tokenizer in {self.model_dir}"
        where = gateway_place(self.gateway_url, self.gateways, started)
        facts = [
            ("agent", self.agent_runtime_arn),
            ("records", f"{self.s3_bucket}  (experiment {self.exp_id})"),
            ("service", self.url),
            ("model", f"{self.base_model}, LoRA rank {self.rank}, asked for as {self.model_id!r}"),
            ("gateway", where),
            ("rows", f"{len(read_rows(self.data_path))} in {self.data_path}"),
            ("steps", f"{self.steps} of {self.groups_per_step} groups of {self.group_size} rollouts"),
            ("loss", f"{self.loss}, advantages {self.estimator}, learning rate {self.learning_rate:g}"),
            ("checkpoints", f"every {self.checkpoint_every} steps" if self.checkpoint_every else "none"),
            ("output", str(self.output_dir)),
        ]
        needs = [] if importlib.util.find_spec("tinker") else [install_command("tinker")]
        if not os.environ.get(KEY_ENV):
            needs.append(f"{KEY_ENV} in the environment")
        if self.gateway_url is None and not (self.model_dir / "tokenizer_config.json").is_file():
            needs.append(f"tokenizer and chat template in {self.model_dir} (model_dir)")
        return Plan(backend="tinker", facts=facts, needs=needs)

"""`SlimeRunner`: launch slime with its rollouts on AgentCore, as a job of a Ray cluster that runs already.

The fields of the published toolkit are accepted, with its defaults. `dry_run` prints the exact command.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from ..._servers.process import terminated_as_interrupted
from ...client.data import encode_payload, read_rows
from ...errors import AgentCoreRLError, ConfigError
from ...runs.folder import SUMMARY, is_run
from ..settings import Plan, planned
from . import trained
from .settings import (
    ADMIN_KEY,
    EngineSettings,
    MachineSettings,
    ModelSettings,
    ReportSettings,
    SlimeSettings,
    TrainingSettings,
)

__all__ = ["SlimeError", "SlimeRunner", "prepare_data"]

PACKAGE = "agentcore_rl_toolkit.backends.slime"
MODEL_ARGS_S = 30

# Options of slime that this backend sets, or that cannot work with rollouts of remote agents, with the reason.
_REFUSED_FLAGS = {
    "--group-rm": "the agent computes the reward of each rollout",
    "--rollout-top-p": "slime would need the kept vocabulary of every token, which agents' calls do not have",
    "--custom-generate-function-path": "rollouts would not reach the agents",
    "--custom-config-path": "the rollout settings would not reach slime",
    "--custom-reward-post-process-path": "slime's own counts masked rollouts as reward 0",
    "--rollout-function-path": "slime's function fails if only some rollouts of a step fork; use the setting `mode`",
}
# Options of slime that are settings of this backend.
_SETTING_OF = {
    **{"--lr": "learning_rate", "--rollout-batch-size": "groups", "--n-samples-per-prompt": "rollouts"},
    **{"--rollout-temperature": "temperature", "--num-rollout": "--steps", "--prompt-data": "data_path"},
    **{"--load": "model_dir", "--hf-checkpoint": "model_dir", "--save": "save_dir", "--save-interval": "save_interval"},
    **{"--tensor-model-parallel-size": "tp_size", "--actor-num-gpus-per-node": "num_gpus", "--eps-clip": "eps_clip"},
}
ADDRESS = "http://127.0.0.1:8265"  # the dashboard of a local cluster
JOB_STOP_S = 60.0
CLIENT_STOP_S = 10.0


class SlimeError(AgentCoreRLError):
    """slime, or the Ray cluster it runs on, ended with an error."""


def run_job(command: Sequence[str], environment: Mapping[str, str], *, job_id: str, address: str) -> int:
    """Submit a job, show its log and wait for its end. Returns the exit code. An interruption of the wait stops the job too."""
    # A separate process group: Ctrl-C ends the wait, and the client can still stop the job.
    client = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
    try:
        return client.wait()
    except BaseException:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.call(["ray", "job", "stop", "--address", address, job_id], timeout=JOB_STOP_S)
        raise
    finally:
        client.terminate()
        try:
            client.wait(CLIENT_STOP_S)
        except subprocess.TimeoutExpired:
            client.kill()
            client.wait()


class SlimeRunner(SlimeSettings):
    """A slime training run. ``extra_flags`` are further arguments of slime. Raises: ConfigError on impossible values."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        **SlimeSettings.ALIASES,
        "rollout_batch_size": "groups",
        "n_samples_per_prompt": "rollouts",
        "rollout_temperature": "temperature",
        "lr": "learning_rate",
    }

    model: ModelSettings
    machines: MachineSettings = Field(default_factory=MachineSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    reports: ReportSettings = Field(default_factory=ReportSettings)
    extra_flags: tuple[str, ...] = ()

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self._check_flags()
        self.signals.check_temperature(self.training.temperature, "temperature")
        if self.judging.judge is not None and self.training.mode == "fully_async":
            raise ConfigError(
                "judge cannot work with mode fully_async, in which slime repeats single rollouts of a group"
            )
        if self.training.mode == "sync" and self.machines.rollout_num_gpus is not None:
            raise ConfigError(
                "rollout_num_gpus needs mode async or fully_async; in mode sync, rollouts use training's num_gpus"
            )

    @classmethod
    def from_yaml(cls, path: str | Path) -> SlimeRunner:
        """Call `from_file`: the published toolkit's name for it."""
        return cls.from_file(path)

    def train(self, num_rollout: int = 1, *, dry_run: bool = False) -> Plan:
        """Run `num_rollout` steps and return the plan that was carried out; with `dry_run` only print it.

        Raises: ConfigError when slime, Megatron, the model or the data are not where the settings say; SlimeError
        when the job fails.
        """
        plan = self.plan(num_rollout)
        if dry_run:
            print(plan.render())
            return plan
        if plan.needs:
            raise ConfigError("cannot start slime: " + "; ".join(plan.needs))
        command = list(plan.command or ())
        job_id = command[command.index("--submission-id") + 1]
        self._write_inputs()
        summary = self.record_folder / SUMMARY
        summary.unlink(missing_ok=True)
        with terminated_as_interrupted():
            try:
                code = run_job(command, plan.environment, job_id=job_id, address=self._job_address())
            finally:
                self.job_path.unlink(missing_ok=True)  # it may contain keys, and others can see the folder
                if self.keeps_trainer_numbers:
                    trained.take_rest(self.record_folder)
        if code:
            raise SlimeError(f"slime ended with exit code {code} (Ray job {job_id}); its log is above")
        if is_run(self.record_folder):
            summary.write_text(json.dumps({"steps": num_rollout}) + "\n")
        return plan

    # -- plan ---------------------------------------------------------------------------------------------------------

    def plan(self, num_rollout: int = 1) -> Plan:
        """Return the exact command, and what this machine lacks to run it. Raises: ConfigError on unreadable data."""
        if num_rollout < 1:
            raise ConfigError(f"num_rollout must be at least 1, got {num_rollout}")
        data = Path(self.data_path)
        facts = planned(self, data=data if data.is_file() else None)
        command = [
            *("ray", "job", "submit", "--address", self._job_address(), "--submission-id", self._new_job_id()),
            *("--runtime-env", str(self.job_path)),
            *("--", sys.executable, str(Path(self.slime_dir).absolute() / self._script())),
            *self.flags(num_rollout),
        ]
        facts += [("slime config", str(self.config_path)), ("job environment", ", ".join(self._job_environment()))]
        return Plan(backend="slime", facts=facts, command=command, needs=self._missing())

    def flags(self, num_rollout: int) -> list[str]:
        """Return the arguments of slime's train.py. Source: arguments.py in slime/utils and backends/sglang_utils, 0.3.1."""
        per_step = self.training.groups * self.training.rollouts
        wandb = self.wandb_project if os.environ.get("WANDB_API_KEY") else None
        # None and False leave an option out, True is one without a value.
        options: dict[str, Any] = {
            "actor-num-nodes": 1,
            "actor-num-gpus-per-node": self.num_gpus,
            "colocate": self.mode == "sync",
            "rollout-num-gpus": None if self.mode == "sync" else self.rollout_gpus,
            # The model folder serves as both: slime reads Hugging Face weights straight from --load (slime >= 0.3).
            "hf-checkpoint": Path(self.model_dir).absolute(),
            "load": self._load_from(),
            "prompt-data": self.folder / "data.jsonl",
            "input-key": "prompt",
            "metadata-key": "metadata",
            "rollout-shuffle": True,
            "num-rollout": num_rollout,
            "rollout-batch-size": self.training.groups,
            "n-samples-per-prompt": self.training.rollouts,
            "over-sampling-batch-size": self.over_sampling_batch_size,
            "rollout-max-response-len": self.rollout_max_response_len,
            "rollout-temperature": self.training.temperature,
            "global-batch-size": per_step,
            "balance-data": True,
            "rollout-function-path": f"{PACKAGE}.rollout.generate_rollout{'_fully_async' if self.mode == 'fully_async' else ''}",
            "custom-generate-function-path": f"{PACKAGE}.generate.generate",
            "custom-config-path": self.config_path,
            # Ours in both cases: slime's own would count masked rollouts as reward 0.
            "custom-reward-post-process-path": f"{PACKAGE}.hooks.normalize_rewards",
            "custom-advantage-function-path": f"{PACKAGE}.hooks.take_token_advantages"
            if self.signals.per_token
            else None,
            "disable-rewards-normalization": self.reward_postprocessing == "none",
            "advantage-estimator": "grpo",
            "eps-clip": self.eps_clip,
            "eps-clip-high": self.eps_clip_high,
            "optimizer": "adam",
            "lr": self.learning_rate,
            "lr-decay-style": "constant",
            "weight-decay": self.weight_decay,
            "adam-beta1": 0.9,
            "adam-beta2": self.adam_beta2,
            "tensor-model-parallel-size": self.tp_size,
            "sequence-parallel": self.tp_size > 1,
            "use-dynamic-batch-size": True,
            "max-tokens-per-gpu": self.max_tokens_per_gpu,
            "rollout-num-gpus-per-engine": self.rollout_gpus_per_engine,
            # slime's limit of samples per engine at once; each sample is one session.
            "sglang-server-concurrency": self._concurrency_per_engine(),
            "sglang-mem-fraction-static": self.sglang_mem_fraction_static,
            "sglang-tool-call-parser": self.sglang_tool_call_parser,
            "sglang-reasoning-parser": self.sglang_reasoning_parser,
            "sglang-context-length": self.sglang_context_length,
            "attention-dropout": 0.0,
            "hidden-dropout": 0.0,
            "accumulate-allreduce-grads-in-fp32": True,
            "attention-softmax-in-fp32": True,
            "attention-backend": "flash",
            "save": None if self.save_dir is None else Path(self.save_dir).absolute(),
            "save-interval": self.save_interval if self.save_dir is not None else None,
            "use-tis": self.use_tis,
            "use-rollout-routing-replay": self.routing_replay,
            "save-debug-train-data": trained.template(self.record_folder) if self.keeps_trainer_numbers else None,
            "use-wandb": wandb is not None,
            "wandb-project": wandb,
            "wandb-group": None if wandb is None else self.wandb_group or self.exp_id,
        }
        flags = self.model_args()
        for name, value in options.items():
            if value is not None and value is not False:
                flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        if self.sglang_data_parallel_size > 1:
            # slime refuses the command unless attention is split in the same way.
            size = str(self.sglang_data_parallel_size)
            flags += ["--sglang-data-parallel-size", size, "--sglang-enable-dp-attention"]
        if self.eval_data_path is not None:
            flags += ["--eval-prompt-data", Path(self.eval_data_path).stem, str(self.folder / "eval.jsonl")]
            flags += ["--eval-interval", str(self.eval_interval)]
            flags += ["--n-samples-per-eval-prompt", str(self.n_samples_per_eval_prompt)]
        return [*flags, *self.extra_flags]

    def model_args(self) -> list[str]:
        """Read the MODEL_ARGS of this model type with bash, as they are a bash array. Empty if slime lacks the file."""
        script = self._model_script()
        if not script.is_file():
            return []
        # The path is an argument, never part of the command text.
        reader = 'source "$1" >/dev/null && printf "%s\\0" "${MODEL_ARGS[@]}"'
        done = subprocess.run(
            ["bash", "-c", reader, "read-model-args", str(script)],
            capture_output=True,
            timeout=MODEL_ARGS_S,
            check=False,
        )
        if done.returncode:
            raise ConfigError(f"{script} cannot be read: {done.stderr.decode(errors='replace')[-500:]}")
        return [a for a in done.stdout.decode().split("\0") if a]

    @property
    def folder(self) -> Path:
        """The folder of rollout.yaml, data.jsonl, eval.jsonl, and job.yaml, which may hold secrets."""
        return Path(self.model.run_dir).absolute() / self.agent.exp_id

    @property
    def config_path(self) -> Path:
        return self.folder / "rollout.yaml"

    @property
    def job_path(self) -> Path:
        return self.folder / "job.yaml"

    @property
    def record_folder(self) -> Path:
        record_dir = self.agent.record_dir
        return self.folder if record_dir is None else Path(record_dir).absolute()

    @property
    def keeps_trainer_numbers(self) -> bool:
        """Return True if the run's folder gets the results of slime's trainer.

        The results go through shared files, which are large if they contain expert routing.
        """
        if self.reports.trainer_numbers is None:
            return self.machines.ray_address is None and not self.engine.routing_replay
        return self.reports.trainer_numbers

    @property
    def rollout_gpus(self) -> int:
        machines = self.machines
        return machines.num_gpus if machines.rollout_num_gpus is None else machines.rollout_num_gpus

    def rollout_settings(self) -> dict[str, Any]:
        names = SlimeSettings.known()
        found = {name: value for name, value in self.shown().items() if name in names and value is not None}
        for name in ("gateway_store", "gateway_model"):  # a job runs in a folder of Ray's
            if name in found and (name == "gateway_store" or Path(found[name]).exists()):  # else a name of the hub
                found[name] = str(Path(found[name]).absolute())
        return {**found, "record_dir": str(self.record_folder)}

    # -- doing it -----------------------------------------------------------------------------------------------------

    def _write_inputs(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # JSON is YAML: no YAML library is needed to write it.
        self.config_path.write_text(json.dumps(self.rollout_settings(), indent=2) + "\n")
        prepare_data(self.data_path, self.folder / "data.jsonl")
        if self.eval_data_path is not None:
            prepare_data(self.eval_data_path, self.folder / "eval.jsonl")
        # Last: it may hold keys, and an error before this leaves none behind.
        self.job_path.touch(mode=0o600)
        self.job_path.chmod(0o600)
        self.job_path.write_text(json.dumps({"env_vars": self._job_environment()}, indent=2) + "\n")

    def _job_environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": str(Path(self.megatron_dir).absolute()), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        own |= {"CUDA_HOME": self.cuda_home} if self.cuda_home else {}
        own |= {ADMIN_KEY: self.gateway_admin_key} if self.gateway_admin_key else {}
        return {**{name: os.environ[name] for name in self.job_env if os.environ.get(name)}, **own}

    def _job_address(self) -> str:
        return self.machines.ray_address or ADDRESS

    def _new_job_id(self) -> str:
        """Return a new id, by which an interrupted run can stop its job."""
        return f"{re.sub(r'[^A-Za-z0-9_-]', '-', self.exp_id)}-{secrets.token_hex(4)}"

    def _model_script(self) -> Path:
        return Path(self.slime_dir) / "scripts" / "models" / f"{self.model_type}.sh"

    def _script(self) -> str:
        return "train.py" if self.mode == "sync" else "train_async.py"

    def _concurrency_per_engine(self) -> int:
        """Return slime's limit per engine. In fully_async mode slime counts groups by the same number."""
        engines = max(1, self.rollout_gpus // self.machines.rollout_gpus_per_engine)
        return max(1, -(-self.limits.max_concurrent // engines))

    def _load_from(self) -> str:
        """Return the save folder if it has a checkpoint, so that the run continues, otherwise the model."""
        save_dir = self.model.save_dir
        resumes = save_dir is not None and (Path(save_dir) / "latest_checkpointed_iteration.txt").is_file()
        return str(Path(save_dir if save_dir is not None and resumes else self.model.model_dir).absolute())

    def with_args(self, words: Sequence[str]) -> SlimeRunner:
        return self.replace(extra_flags=(*self.extra_flags, *words))

    def _check_flags(self) -> None:
        for name in (flag.partition("=")[0] for flag in self.extra_flags):
            if name in _SETTING_OF:
                raise ConfigError(f"extra_flags: {name} is a setting of this backend: {_SETTING_OF[name]}")
            if name in _REFUSED_FLAGS:
                raise ConfigError(f"extra_flags: {name} cannot work here: {_REFUSED_FLAGS[name]}")

    def _missing(self) -> list[str]:
        needs = []
        if not (Path(self.slime_dir) / self._script()).is_file():
            needs.append(f"slime at slime_dir={self.slime_dir} (git clone THUDM/slime; it is not on the package index)")
        elif not self._model_script().is_file():
            needs.append(f"model_type {self.model_type}: there is no {self._model_script()}")
        folders = {"megatron_dir": "Megatron-LM", "model_dir": "the model", "data_path": "the data"}
        for name, what in {**folders, "eval_data_path": "the data"}.items():
            if (path := getattr(self, name)) and not Path(path).exists():
                needs.append(f"{what} at {name}={path}")
        if shutil.which("ray") is None:
            needs.append("Ray (pip install 'ray[default]')")
        return needs


def prepare_data(source: str | Path, target: Path) -> None:
    """Write rows in slime's ``{"prompt", "metadata"}`` form, the payload as metadata.

    slime needs the key `prompt`. A payload without one gets an empty prompt, which the agent does not see.
    Raises: ConfigError.
    """
    rows = read_rows(source)
    lines = [encode_payload({"prompt": _text(row.get("prompt", "")), "metadata": row}) for row in rows]
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)

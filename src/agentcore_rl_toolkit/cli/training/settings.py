"""Settings of a run on this machine: from options, a file, or the run that is resumed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..._installation import missing_extra
from ...backends.collection.groups import trained_temperature
from ...backends.scorer import split_spec
from ...backends.settings import SettingsGroup, read_settings
from ...backends.training.settings import LearnerSettings, LoopSettings
from ...client.data import read_rows
from ...errors import ConfigError
from ...gateway.config import ForcedTools, History
from ...policy.losses import check_options
from ...runs import locked, read_config, write_config
from ...runs.folder import make_folder
from ..models import model_folder
from ..servers.vllm import find_python
from .stack import Stack, find_agent
from .trackers import check_installed

_PATHS = ("agent", "data_path", "eval_data_path", "model", "judge")
# Numbers of parameters: below, models are for demonstrations; above, training all weights takes too much memory.
_TINY, _LARGE = 10_000_000, 500_000_000


def fitted(given: dict[str, Any]) -> dict[str, Any]:
    """Add the settings that follow from the model's size. Raises: ConfigError."""
    model = None if given.get("model") is None else model_folder(given["model"])
    rank = given.get("lora_rank")
    found = by_size(model, None if rank is None else LearnerSettings(lora_rank=rank).lora_rank)
    return {**given, **{name: value for name, value in found.items() if given.get(name) is None}, "model": model}


class InputSettings(SettingsGroup):
    """The agent's file and its data: one payload per line.

    Without ``eval_data_path`` the share ``held_out`` of the data is kept for evaluations.
    """

    agent: Path
    data_path: Path
    eval_data_path: Path | None = None
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.0


class SessionSettings(SettingsGroup):
    """The sessions on this machine.

    ``session_env`` are their variables, as K=V, or K for this process's value. ``readable`` and ``writable`` are paths of this
    machine that they may use besides the agent's project. For an unmodified agent, ``model_hosts`` are
    further hosts of model APIs, and ``policy_models`` the models that the policy replaces.
    """

    session_env: tuple[str, ...] = Field(default=(), repr=False)
    model_hosts: tuple[str, ...] = ()
    policy_models: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()


class LocalRun(LoopSettings):
    """The settings of `agentcore-rl train` for an agent's file on this machine.

    ``engine`` serves the model. ``forced_tools`` is `GatewayConfig`'s, for calls in which the agent forces a tool or a schema
    (None: constrain, if the engine can). ``history`` is `GatewayConfig`'s too. ``tracker`` names the receivers of the metrics
    besides `metrics.jsonl`.
    Raises: ConfigError.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        **LoopSettings.ALIASES,
        "data": "data_path",
        "eval_data": "eval_data_path",
        "rollout_deadline_s": "rollout_timeout_s",
    }
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "rollout_timeout_s": 120.0,
        "max_concurrent": 64,
        "tps_limit": 1000,  # the runtime is on this machine
        "checkpoint_every": 1,
        "minibatches": 4,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "schedule": "linear",  # a constant learning rate made policies forget at the end
        "warmup_steps": 2,
        "beta2": 0.99,
        "max_grad_norm": 1.0,
    }

    inputs: InputSettings
    learner: LearnerSettings = Field(default_factory=LearnerSettings)
    sessions: SessionSettings = Field(default_factory=SessionSettings)
    engine: Literal["policy", "vllm"] = "policy"
    forced_tools: ForcedTools | None = None
    history: History = "sampled"
    tracker: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("loss") == "importance_sampling":  # it has no options, which a file or an older run may have
            given = {**given, "clip_low": None, "clip_high": None, "dual_clip": None, "loss_options": {}}
        return fitted(given)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        inputs = self.inputs
        if inputs.held_out and inputs.eval_data_path is not None:
            raise ConfigError("give eval_data_path or held_out, not both")
        if self.step.eval_every and not inputs.held_out and inputs.eval_data_path is None:
            raise ConfigError("eval_every needs rows that are not trained on: give eval_data_path or held_out")
        if not inputs.agent.is_file():
            raise ConfigError(f"there is no agent file {inputs.agent}; `agentcore-rl init NAME` makes an agent")
        self.signals.check_temperature(
            trained_temperature(self.selection.sampling_params), "sampling_params.temperature"
        )
        check_options(self.update.loss, self.update.loss_options)
        check_installed(self.tracker)
        if self.learner.lora_rank and importlib.util.find_spec("peft") is None:
            raise missing_extra(
                "lora_rank, by default 16 from half a billion parameters on, needs the package 'peft'", "lora"
            )
        if self.engine == "vllm":
            find_python()

    @property
    def title(self) -> str:
        """The agent's name in what is shown."""
        agent = self.inputs.agent
        return agent.parent.name if agent.stem in ("agent", "rl_app", "app") else agent.stem

    def rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rows (to train on, held out). Raises: ConfigError when there is nothing to train on."""
        inputs = self.inputs
        rows = read_rows(inputs.data_path)
        held_out = read_rows(inputs.eval_data_path) if inputs.eval_data_path is not None else []
        if inputs.held_out:
            # A random sample, because data is often sorted. The same seed holds out the same rows.
            drawn = random.Random(f"held out/{self.step.seed}")
            chosen = set(drawn.sample(range(len(rows)), round(len(rows) * inputs.held_out)))
            held_out = [row for i, row in enumerate(rows) if i in chosen]
            rows = [row for i, row in enumerate(rows) if i not in chosen]
            if not held_out:
                raise ConfigError(
                    f"held_out {inputs.held_out:g} of {len(rows)} rows is less than one row: give a larger share"
                )
        if not rows:
            raise ConfigError(f"{inputs.data_path} has no rows to train on")
        return rows, held_out

    def kept(self) -> dict[str, Any]:
        """Return the settings as a run keeps them: only the names of session variables."""
        return {**self.flat(), "session_env": sorted(variable_names(self.sessions.session_env))}


def by_size(model: Path | None, lora_rank: int | None = None) -> dict[str, Any]:
    """Return the settings that follow from a model's size. Raises: ConfigError if this machine has too little memory."""
    if model is None:
        small = {"learning_rate": 5e-4, "lora_rank": 0, "tokens_at_once": 4096, "gradient_checkpointing": False}
        return {**small, "dtype": "float32"}
    from ...policy.loading import check_memory, placement, sizes_of

    sizes = sizes_of(model)
    large = sizes.parameters >= _LARGE
    rank = (16 if large else 0) if lora_rank is None else lora_rank
    what = f"training {sizes.text} ({'adapters' if rank else 'all weights'})"
    check_memory(sizes.training(lora=rank > 0), what)
    tiny = sizes.parameters < _TINY
    return {
        "learning_rate": 5e-4 if tiny else 1e-4 if rank else 1e-5,
        "lora_rank": rank,
        "tokens_at_once": 4096 if tiny else 2048,
        "gradient_checkpointing": large,
        "dtype": str(placement(sizes.parameters)[1]).removeprefix("torch."),
    }


def read(flags: Mapping[str, Any], file: Path | None, running: Stack | None = None) -> LocalRun:
    """Read the settings. Flags win over the file, whose paths are relative to its folder. Raises: ConfigError.

    Without a scorer of either, the agent of the ``running`` stack has the stack's, unless credit is `turn`.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values = LocalRun.plain(read_settings(file))
        for name in _PATHS:
            inside = file.parent / str(values.get(name))
            if isinstance(values.get(name), str) and (name != "model" or inside.exists()):  # else a name of the hub
                values[name] = str((file.parent / values[name]).resolve())
        if isinstance(values.get("score"), str):
            place, function = split_spec(str(file.parent / values["score"]))
            values["score"] = f"{place}:{function}" if Path(place).is_file() else values["score"]
        for name in ("readable", "writable"):
            values[name] = [str((file.parent / path).resolve()) for path in values.get(name, ())]
    given = _given(flags)
    for one, other in (("eval_data_path", "held_out"), ("held_out", "eval_data_path")):
        if given.get(one) is not None and other not in given:  # both set the same: the option wins
            values.pop(other, None)
    values |= given
    for name, option in (("agent", "--agent FILE"), ("data_path", "--data ROWS.jsonl")):
        if not values.get(name):
            raise ConfigError(f"{option} is missing: `agentcore-rl init NAME` makes an agent with data to begin with")
    if running is not None and values["agent"] == running.agent and values.get("credit") != "turn":
        values.setdefault("score", running.score)
    return LocalRun.from_values(values, where=str(file or "options"))


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given, with paths as they are stored."""
    given = LocalRun.plain(flags)
    paths = {k: v for k, v in given.items() if k in _PATHS and v is not None}
    given |= {k: str(model_folder(v) if k == "model" else Path(v).resolve()) for k, v in paths.items()}
    return {**given, "agent": str(find_agent(str(flags["agent"])))} if "agent" in paths else given


def variable_names(session_env: Sequence[str]) -> list[str]:
    """Return the names of session variables, which may be written and printed."""
    return [pair.partition("=")[0] for pair in session_env]


def new_run(settings: LocalRun, out: Path | None) -> Path:
    """Make a folder for the run, with its settings. Raises: ConfigError if the folder has a run."""
    run_dir = new_folder(out, settings.inputs.agent.parent.name)
    write_config(run_dir, settings.kept())
    return run_dir


def new_folder(out: Path | None, name: str) -> Path:
    """Make the folder of a new run. Raises: ConfigError if it has one."""
    if out is None:
        return make_folder(Path("runs").resolve(), f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    run_dir = out.resolve()
    if (run_dir / "config.json").exists():
        raise ConfigError(f"{run_dir} already holds a run; continue it with --resume, or choose another --out")
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def old_run(out: Path | None, flags: Mapping[str, Any]) -> tuple[Path, LocalRun]:
    """Return the run in ``out``, or the newest unfinished run without a process, and its settings.

    A run keeps its settings. Only ``steps`` may become more, also after the run has ended. Raises: ConfigError.
    """
    if out is None:
        runs = {
            path.parent
            for path in Path("runs").glob("*/config.json")
            if (keys := json.loads(path.read_text()).keys()) & {"data", "data_path"} and "kind" not in keys
        }
        for path in sorted(runs, key=lambda path: path.stat().st_mtime):
            if not (path / "summary.json").exists():
                with contextlib.suppress(ConfigError), locked(path):
                    out = path
        if out is None:
            raise ConfigError(
                "there is no unfinished run under runs/; start one without --resume, or name it with --out"
            )
    run_dir = out.resolve()
    if not (run_dir / "config.json").exists():
        raise ConfigError(f"{run_dir} holds no run to continue (no config.json)")
    where = str(run_dir / "config.json")
    stored = LocalRun.plain(json.loads((run_dir / "config.json").read_text()))
    before = LocalRun.from_values(stored, where=where)
    settings = LocalRun.from_values({**stored, **_given(flags)}, where=where)
    old, new = before.kept(), settings.kept()
    changed = [name for name in new if new[name] != old[name] and name != "teacher_url"]
    if new["steps"] > old["steps"]:
        changed.remove("steps")
    if changed:
        raise ConfigError(f"a resumed run keeps its settings, except for more steps; drop {', '.join(changed)}")
    write_config(run_dir, {**read_config(run_dir), "steps": settings.step.steps}, replace=True)
    return run_dir, settings

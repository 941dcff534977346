"""Settings of a run on this machine: from options, a file, or the run that is resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..._installation import missing_extra
from ...backends.collection.advantages import Estimator
from ...backends.collection.credit import Credit
from ...backends.collection.groups import WHOLE_DISTRIBUTION, CollectConfig, PolicyFailures, trained_temperature
from ...backends.llm_judge import JudgeSettings
from ...backends.settings import Count, GroupSize, Least0, NotNegative, Positive, from_mapping, read_settings
from ...backends.training.client import Adam, Loss, Schedule
from ...backends.training.settings import LoopSettings
from ...client.data import read_rows
from ...errors import ConfigError
from ...runs import locked, make_folder, read_config, write_config
from ..models import model_folder
from ..servers.vllm import find_python
from .stack import ENGINES, find_agent
from .trackers import TRACKERS, check_installed

if TYPE_CHECKING:
    from ...backends.training.torch_client import TorchSettings

_PATHS = ("agent", "data", "eval_data", "model", "judge")
_FOLDERS = ("readable", "writable")
_TINY, _LARGE = 10_000_000, 500_000_000  # parameters: of models made for a demonstration; too many to train all of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sized:
    """Settings of a model and its updates. What is None follows from the model's size (`by_size`).

    ``model`` is a folder, a name of the hub or a GGUF file, None the built-in policy. ``learning_rate`` is the peak.
    ``lora_rank`` 0 trains all weights; adapters count ``lora_alpha`` / rank, None: twice the rank. ``tokens_at_once`` of a
    minibatch are computed together; ``gradient_checkpointing`` saves memory. Engine and trainer multiply matrices in ``dtype``.
    ``beta1``, ``beta2``, ``weight_decay`` and ``max_grad_norm`` (0: no limit) are those of AdamW. ``kl_penalty`` times the
    divergence from the model at the start is added to the loss of each token.
    """

    model: Path | None = None
    learning_rate: Positive | None = None
    lora_rank: Least0 | None = None
    lora_alpha: Count | None = None
    tokens_at_once: Count | None = None
    gradient_checkpointing: bool | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    max_grad_norm: NotNegative = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: NotNegative = 0.0
    kl_penalty: NotNegative = 0.0
    seed: int = 0

    @property
    def adam(self) -> Adam:
        """The optimizer's settings at the peak of the learning rate."""
        assert self.learning_rate is not None
        return Adam(
            learning_rate=self.learning_rate, beta1=self.beta1, beta2=self.beta2, grad_clip_norm=self.max_grad_norm
        )

    def torch(self, *, temperature: float = 1.0, dtype: str | None = None, threads: int | None = None) -> TorchSettings:
        """How the model is trained in this process. ``dtype`` is the engine's, if it reports one."""
        from ...backends.training.torch_client import TorchSettings

        return TorchSettings(
            model_dir=self.model,
            dtype=dtype or self.dtype or "float32",
            lora_rank=self.lora_rank or 0,
            lora_alpha=self.lora_alpha,
            tokens_at_once=self.tokens_at_once or 4096,
            gradient_checkpointing=bool(self.gradient_checkpointing),
            temperature=temperature,
            weight_decay=self.weight_decay,
            kl_penalty=self.kl_penalty,
            threads=threads,
            seed=self.seed,
        )

    def fit(self, model: Path | str | None) -> None:
        """Take this model, and what follows from its size. Raises: ConfigError."""
        folder = None if model is None else model_folder(model)  # of a run, the model that it trained
        object.__setattr__(self, "model", folder)
        for name, value in by_size(folder, self.lora_rank).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalRun(Sized, Credit, JudgeSettings):
    """The settings of `agentcore-rl train` for an agent's file on this machine.

    `backends.training.loop` trains. ``data`` and ``eval_data`` hold one
    payload a line; without ``eval_data`` the share ``held_out`` of the data is kept for it. ``engine`` serves the model ("policy"
    or "vllm"). A step runs ``groups`` inputs, ``rollouts`` times each.
    Groups with equal rewards are replaced by others, up to ``replace_up_to`` times ``groups`` in a step.
    ``staleness`` weight versions may lie between a rollout's start and its training; with
    ``hold_calls`` weights change between model calls only. Every ``eval_every`` steps the held-out rows are run; 0: before
    and after only.
    A step has ``minibatches`` optimizer steps, and ratios are clipped to 1 - ``clip_low`` and 1 + ``clip_high``. ``dual_clip``
    bounds the loss of tokens with a negative advantage. The learning rate rises for ``warmup_steps`` and follows ``schedule``.
    `Credit` and ``estimator`` say how the advantages of tokens come about. ``policy_failures`` is `CollectConfig`'s, and
    ``train_on`` its `train`.
    ``sampling_params`` are `CollectConfig`'s, too.
    ``tracker`` names what gets the metrics besides `metrics.jsonl`. ``session_env`` are variables of the sessions, as K=V, or K
    for the value that it has here; ``readable`` and ``writable`` are what they may use of this machine besides the agent's
    project.
    Raises: ConfigError.
    """

    agent: Path
    data: Path
    eval_data: Path | None = None
    held_out: NotNegative = 0.0
    engine: str = "policy"
    steps: Count = 32
    groups: Count = 8
    rollouts: GroupSize = 8
    estimator: Estimator = "grpo"
    minibatches: Count = 4
    clip_low: NotNegative = 0.2
    clip_high: NotNegative = 0.28
    dual_clip: Positive | None = None
    schedule: Schedule = "linear"
    warmup_steps: Least0 = 2
    replace_up_to: float = 1.0
    staleness: Least0 = 0
    hold_calls: bool = False
    eval_every: Least0 = 0
    max_concurrent: Count = 64
    rollout_deadline_s: Positive = 120.0
    policy_failures: PolicyFailures = "score"
    train_on: str | None = None
    sampling_params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tracker: tuple[str, ...] = ()
    session_env: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replace_up_to < 1:
            raise ConfigError(f"replace_up_to is a factor of at least 1, got {self.replace_up_to:g}")
        if self.held_out >= 1:
            raise ConfigError(f"held_out is a share of the data, from 0 to less than 1, got {self.held_out}")
        if self.held_out and self.eval_data is not None:
            raise ConfigError("give eval_data or held_out, not both")
        if self.eval_every and not self.held_out and self.eval_data is None:
            raise ConfigError("eval_every needs rows that are not trained on: give eval_data or held_out")
        for name in self.tracker:
            if name not in TRACKERS:
                raise ConfigError(f"there is no tracker {name!r}; there are {', '.join(TRACKERS)}")
        check_installed(self.tracker)
        if not self.agent.is_file():
            raise ConfigError(f"there is no agent file {self.agent}; `agentcore-rl init NAME` makes an agent")
        self.check_temperature(trained_temperature(self.sampling_params), "sampling_params.temperature")
        self.fit(self.model)
        if self.lora_rank and importlib.util.find_spec("peft") is None:
            raise missing_extra(
                "lora_rank, by default 16 from half a billion parameters on, needs the package 'peft'", "lora"
            )
        if self.engine not in ENGINES:
            raise ConfigError(f"engine is one of {', '.join(ENGINES)}, got {self.engine!r}")
        if self.engine == "vllm":
            find_python()

    @property
    def title(self) -> str:
        """The agent's name in what is shown."""
        return self.agent.parent.name if self.agent.stem in ("agent", "rl_app", "app") else self.agent.stem

    def rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(trained on, held out). Raises: ConfigError when there is nothing to train on."""
        rows = read_rows(self.data)
        held_out = read_rows(self.eval_data) if self.eval_data is not None else []
        if self.held_out:
            # Not the first ones: data is often sorted. The same seed keeps the same rows.
            chosen = set(
                random.Random(f"held out/{self.seed}").sample(range(len(rows)), round(len(rows) * self.held_out))
            )
            held_out = [row for i, row in enumerate(rows) if i in chosen]
            rows = [row for i, row in enumerate(rows) if i not in chosen]
            if not held_out:
                raise ConfigError(f"held_out {self.held_out:g} of {len(rows)} rows is no row: give a larger share")
        if not rows:
            raise ConfigError(f"{self.data} has no row to train on")
        return rows, held_out

    def collect(self) -> CollectConfig:
        """How rollouts are collected."""
        return CollectConfig(
            require_reward=self.uses_rewards,
            credit=self.credit,
            teacher_url=self.teacher_url,
            train=self.train_on,
            sampling_params=self.sampling_params,
            max_concurrent=self.max_concurrent,
            rollout_timeout_s=self.rollout_deadline_s,
            policy_failures=self.policy_failures,
            judged_by=JudgeSettings.of(self),
        )

    def loop(self) -> LoopSettings:
        """The settings of the training loop."""
        clip = {"clip_low_threshold": 1 - self.clip_low, "clip_high_threshold": 1 + self.clip_high}
        if self.dual_clip is not None:
            clip["dual_clip"] = self.dual_clip
        return LoopSettings(
            steps=self.steps,
            groups=self.groups,
            rollouts=self.rollouts,
            adam=self.adam,
            collect=self.collect(),
            credit=self,
            estimator=self.estimator,
            loss=Loss(name="ppo", options=clip),
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
            minibatches=self.minibatches,
            replace_up_to=self.replace_up_to,
            staleness=self.staleness,
            hold_calls=self.hold_calls,
            eval_every=self.eval_every,
            checkpoint_every=1,
            seed=self.seed,
        )

    def kept(self) -> dict[str, Any]:
        """The settings as a run keeps them: of session variables only the names."""
        return {**dataclasses.asdict(self), "session_env": variable_names(self.session_env)}


def by_size(model: Path | None, lora_rank: int | None = None) -> dict[str, Any]:
    """The settings that follow from a model's size. Raises: ConfigError when there is too little memory to train it here."""
    if model is None:
        small = {"learning_rate": 5e-4, "lora_rank": 0, "tokens_at_once": 4096, "gradient_checkpointing": False}
        return {**small, "dtype": "float32"}
    from ...policy.loading import check_memory, placement, sizes_of

    sizes = sizes_of(model)
    large = sizes.parameters >= _LARGE
    rank = (16 if large else 0) if lora_rank is None else lora_rank
    what = f"training {sizes.parameters / 1e6:,.0f} million parameters ({'adapters' if rank else 'all weights'})"
    check_memory(sizes.training(lora=rank > 0), what)
    tiny = sizes.parameters < _TINY
    return {
        "learning_rate": 5e-4 if tiny else 1e-4 if rank else 1e-5,
        "lora_rank": rank,
        "tokens_at_once": 4096 if tiny else 2048,
        "gradient_checkpointing": large,
        "dtype": str(placement(sizes.parameters)[1]).removeprefix("torch."),
    }


def read(flags: Mapping[str, Any], file: Path | None) -> LocalRun:
    """Flags over the file; paths in the file are seen from its folder. Raises: ConfigError."""
    values: dict[str, Any] = {}
    if file is not None:
        values = dict(read_settings(file))
        for name in _PATHS:
            inside = file.parent / str(values.get(name))
            if isinstance(values.get(name), str) and (name != "model" or inside.exists()):  # else a name of the hub
                values[name] = str((file.parent / values[name]).resolve())
        for name in _FOLDERS:
            values[name] = [str((file.parent / path).resolve()) for path in values.get(name, ())]
    given = _given(flags)
    for one, other in (("eval_data", "held_out"), ("held_out", "eval_data")):
        if one in given and other not in given:  # two ways to say the same: the option wins
            values.pop(other, None)
    values |= given
    for name, option in (("agent", "--agent FILE"), ("data", "--data ROWS.jsonl")):
        if not values.get(name):
            raise ConfigError(f"{option} is missing: `agentcore-rl init NAME` makes an agent with data to begin with")
    return from_mapping(LocalRun, values, where=str(file or "options"))


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, paths as they are stored."""
    given = {k: v for k, v in flags.items() if v not in (None, ())}
    given |= {k: str(model_folder(v) if k == "model" else Path(v).resolve()) for k, v in given.items() if k in _PATHS}
    return {**given, "agent": str(find_agent(str(flags["agent"])))} if "agent" in given else given


def variable_names(session_env: Sequence[str]) -> list[str]:
    """The names of session variables: what may be written down and printed."""
    return [pair.partition("=")[0] for pair in session_env]


def new_run(settings: LocalRun, out: Path | None, name: str | None = None) -> Path:
    """A folder for the run, with its settings. Raises: ConfigError when it holds one."""
    run_dir = new_folder(out, name or settings.agent.parent.name)
    write_config(run_dir, settings.kept())
    return run_dir


def new_folder(out: Path | None, name: str) -> Path:
    """The folder of a new run. Raises: ConfigError when it holds one."""
    if out is None:
        return make_folder(Path("runs").resolve(), f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    run_dir = out.resolve()
    if (run_dir / "config.json").exists():
        raise ConfigError(f"{run_dir} already holds a run; go on with --resume, or choose another --out")
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def old_run(out: Path | None, flags: Mapping[str, Any]) -> tuple[Path, LocalRun]:
    """Return the run in ``out``, or the newest unfinished one that no process works on, and its settings.

    A run keeps its settings. Only ``steps`` may become more, also after the run has ended. Raises: ConfigError.
    """
    if out is None:
        runs = {path.parent for path in Path("runs").glob("*/config.json") if "data" in json.loads(path.read_text())}
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
        raise ConfigError(f"{run_dir} holds no run to go on with (no config.json)")
    stored = json.loads((run_dir / "config.json").read_text())
    stored.setdefault("lora_alpha", 8)  # an older run has peft's default
    if stored.get("sampling_params") == WHOLE_DISTRIBUTION:  # an older run's default, which did not hold in evaluations
        stored["sampling_params"] = {}
    given = _given(flags)
    variables = given.pop("session_env", None)
    if "teacher_url" in given:  # the teacher may be somewhere else by now
        stored["teacher_url"] = given.pop("teacher_url")
    if (steps := given.get("steps")) is not None and int(steps) > stored["steps"]:
        stored["steps"] = int(given.pop("steps"))
    changed = [k for k, v in given.items() if stored.get(k) != (list(v) if isinstance(v, tuple) else v)]
    if variables is not None:
        if sorted(variable_names(variables)) != sorted(stored.get("session_env", ())):
            changed.append("session_env")
        stored["session_env"] = variables
    if changed:
        raise ConfigError(f"a resumed run keeps its settings, except for more steps; drop {', '.join(changed)}")
    settings = from_mapping(LocalRun, stored, where=str(run_dir / "config.json"))
    write_config(run_dir, {**read_config(run_dir), "steps": settings.steps}, replace=True)
    return run_dir, settings

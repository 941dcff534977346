"""Train an agent's file on this machine with TRL's GRPOTrainer: same stack, display, files and checks as the loop.

TRL keeps a checkpoint of model, optimizer and scheduler after every batch of rollouts, from which a resumed run goes on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import CaptureError
from ..servers.vllm import MODEL_ID
from .job import TPS_LIMIT, Job, Parts
from .stack import Stack


def train_with_trl(job: Job, parts: Parts) -> None:
    """Call it on the main thread. Raises: AgentCoreRLError; KeyboardInterrupt on Ctrl-C and SIGTERM."""
    with Interrupts() as interrupts:
        _Training(job, parts, interrupts).run()


class _Training:
    """One run of TRL's trainer, whose steps are reported under the names of the loop."""

    def __init__(self, job: Job, parts: Parts, interrupts: Interrupts) -> None:
        from ...backends.trl import adapter
        from ...backends.trl.config import TrlConfig

        self._adapter, self._job, self._run, self._interrupts = adapter, job, parts, interrupts
        self._observe = parts.observer
        batch = job.settings.groups * job.settings.rollouts
        # Optimizer steps on each batch of rollouts: TRL cuts a batch into equal parts.
        self._parts = next(n for n in range(min(job.config.minibatches, batch), 0, -1) if batch % n == 0)
        self._config = TrlConfig(**trl_values(job, parts.stack, self._parts))
        self._groups: Sequence[Any] = ()
        self._stats: Any = None
        self._began_s = self._collected_s = 0.0
        self._logs: list[dict[str, Any]] = []

    def run(self) -> None:
        import torch

        from ...backends.collection.collect import check_usable
        from ...policy import load_policy

        job = self._job
        torch.manual_seed(job.config.seed)
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
        model, tokenizer = load_policy(job.settings.model)
        places = range(job.config.steps * job.config.groups)
        trainer = self._adapter.make_trainer(
            self._config,
            client=self._run.client,
            gateway=self._run.gateway,
            rows=[self._job.loop.row_at(place, job.rows, job.config) for place in places],
            model=model,
            tokenizer=tokenizer,
            callbacks=[_callback(self)],
            on_rollout=self._rollout,
            on_batch=self._batch,
            recording=self._run.recording,
        )
        _be_quiet(trainer)
        checkpoint = newest_checkpoint(self._config.output_dir / "trl")
        if checkpoint is None:
            if (job.run_dir / "metrics.jsonl").exists():  # stopped before its first checkpoint
                self._observe("resumed", {"steps_done": 0, "rollouts_done": 0})
            trainer.rollouts.sync_weights(trainer)
            if job.held_out:
                check_usable(self._evaluate("before", trainer))
        else:
            done = steps_of(checkpoint) // self._parts
            batch = job.config.groups * job.config.rollouts
            self._observe("resumed", {"steps_done": done, "rollouts_done": len(job.held_out) + done * batch})
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
        self._interrupts.check()
        if job.held_out:
            self._evaluate("after", trainer)
        trained = trainer.accelerator.unwrap_model(trainer.model)
        if job.config.lora_rank:
            trained = trained.merge_and_unload()
        trained.save_pretrained(job.run_dir / "policy")
        tokenizer.save_pretrained(job.run_dir / "policy")

    def _evaluate(self, when: str, trainer: Any) -> Sequence[Any]:
        """One rollout of each held-out input, by the weights that are in place."""
        from ...backends.collection.collect import GroupRequest, collect

        rows = self._job.held_out
        self._observe("rollouts_started", {"phase": when, "total": len(rows)})
        groups = collect(
            [GroupRequest(input_id=f"{when}/{i:04d}", payload=row) for i, row in enumerate(rows)],
            client=self._run.client,
            gateway=self._run.gateway,
            config=self._config.collect_config(),
            on_rollout=self._rollout,
            recording=self._run.recording.at(when),
        )
        version = 0 if when == "before" else self._job.config.steps
        self._observe("evaluated", {"when": when, "version": version, **self._job.loop.summarise(groups)})
        return groups

    def _rollout(self, rollout: Any) -> None:
        self._observe("rollout", {"rollout": rollout})

    def _batch(self, groups: Sequence[Any], stats: Any) -> None:
        self._groups, self._stats, self._collected_s = groups, stats, time.monotonic()

    def step_begins(self, optimizer_steps: int) -> None:
        """TRL begins an optimizer step; the first on each batch collects it. Raises: KeyboardInterrupt."""
        self._interrupts.check()
        if optimizer_steps % self._parts:
            return
        self._began_s, self._logs = time.monotonic(), []
        total = self._job.config.groups * self._job.config.rollouts
        step = optimizer_steps // self._parts
        self._observe("rollouts_started", {"phase": f"step-{step:04d}", "total": total})

    def logged(self, optimizer_steps: int, values: dict[str, Any]) -> None:
        """TRL has finished an optimizer step; a checkpoint follows the last on a batch. Raises: CaptureError."""
        if "loss" not in values:
            return
        self._logs.append(values)
        gap = self._gap()
        if gap is not None and not gap <= self._job.config.max_logprob_gap:
            raise CaptureError(f"recorded and recomputed logprobs differ by {gap}: another model?")
        if optimizer_steps % self._parts == 0:
            self._interrupts.hold()  # until the step is in the checkpoint and in the metrics

    def _gap(self) -> float | None:
        """Of this batch: TRL says it with the first optimizer step on it."""
        gaps = [float(log["agentcore/logprob_gap"]) for log in self._logs if "agentcore/logprob_gap" in log]
        return max(gaps, default=None)

    def saved(self, optimizer_steps: int) -> None:
        """TRL has written a checkpoint: a step of ours is done. Raises: KeyboardInterrupt."""
        last, now_s = self._logs[-1], time.monotonic()
        names = {
            "loss": "loss",
            "grad_norm": "grad_norm",
            "clip_ratio/region_mean": "clip_fraction",
            "entropy": "entropy",
        }
        self._observe(
            "step",
            {
                "step": optimizer_steps // self._parts - 1,
                "learning_rate": last["learning_rate"],
                **self._job.loop.summarise(self._groups),
                "sequences": self._stats.usable,
                "sampled_tokens": self._stats.sampled_tokens,
                "trained_tokens": self._stats.trained_tokens,
                "logprob_gap": self._gap(),
                **{ours: last[theirs] for theirs, ours in names.items() if theirs in last},
                "rollout_s": self._collected_s - self._began_s,
                "train_s": now_s - self._collected_s,
            },
        )
        self._interrupts.release()


def _callback(training: _Training) -> Any:
    """TRL's events, passed on."""
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            training.step_begins(int(state.global_step))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            training.logged(int(state.global_step), dict(logs or {}))

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            training.saved(int(state.global_step))

    return Callback()


def _be_quiet(trainer: Any) -> None:
    """Our display says all that transformers would print."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
    from transformers.utils import logging

    logging.set_verbosity_error()  # a resumed run would be told that a tied head is not in its checkpoint
    for printing in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printing)


class Interrupts:
    """Ctrl-C and SIGTERM end the block with KeyboardInterrupt, also where a library swallows the first one."""

    def __init__(self) -> None:
        self._seen = self._held = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: Any) -> None:
        self._seen = True
        if not self._held:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """Keep what comes until `release`."""
        self._held = True

    def release(self) -> None:
        """Raises: KeyboardInterrupt when there was one."""
        self._held = False
        self.check()

    def check(self) -> None:
        """Raises: KeyboardInterrupt when there was one."""
        if self._seen:
            raise KeyboardInterrupt


def newest_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint that TRL left here; one that was cut off has no state yet."""
    found = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(found, key=steps_of, default=None)


def steps_of(checkpoint: Path) -> int:
    """Optimizer steps before a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def trl_values(job: Job, stack: Stack, parts: int) -> dict[str, Any]:
    """The run under the names of `TrlConfig`; ``parts`` optimizer steps on each batch of rollouts."""
    config = job.config
    return {
        "agent_runtime_arn": stack.agent_arn,
        "s3_bucket": stack.store,
        "exp_id": job.run_dir.name,
        "model": str(job.settings.model or "built-in"),
        "model_id": MODEL_ID,
        "endpoint_url": stack.runtime_url,
        "gateway_url": stack.gateway_url,
        "gateway_admin_key": stack.gateway_admin_key,
        "policy_url": stack.policy_url,
        "policy_engine": stack.engine,
        "output_dir": job.run_dir,
        "tps_limit": TPS_LIMIT,
        "num_generations": config.rollouts,
        "check_logprobs": True,
        "lora": {"r": config.lora_rank, "target_modules": "all-linear"} if config.lora_rank else None,
        "max_concurrent": config.max_concurrent,
        "rollout_timeout_s": config.rollout_deadline_s,
        "policy_failures": config.policy_failures,
        "training": {
            "seed": config.seed,
            "max_steps": config.steps * parts,
            "steps_per_generation": parts,
            "per_device_train_batch_size": config.groups * config.rollouts // parts,
            "gradient_accumulation_steps": 1,
            "shuffle_dataset": False,  # the rows come in the order of the steps
            "learning_rate": config.learning_rate,
            "lr_scheduler_type": "linear",
            "warmup_steps": 2 * parts,
            "weight_decay": 0.0,
            "adam_beta2": 0.99,
            "max_grad_norm": config.max_grad_norm,
            "loss_type": "dapo",
            "epsilon": config.clip_low,
            "epsilon_high": config.clip_high,
            "disable_tqdm": True,
            "report_to": [],
            "save_strategy": "steps",
            "save_steps": parts,
            "save_total_limit": 1,
        },
    }

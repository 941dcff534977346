"""Run TRL's GRPOTrainer on rollouts of a remote agent.

TRL asks `AgentCoreRollouts` for the rollouts of a batch of prompts; it publishes the current weights, collects
the groups and returns the recorded tokens. TRL's prompt is the payload as one line of JSON, because TRL passes prompts
without their rows. This needs no lookup, also in another process or a resumed run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..._installation import missing_extra
from ...client import RolloutClient
from ...client.data import encode_payload, payload_id, read_rows
from ...errors import ConfigError, MissingExtraError
from ...gateway import GatewayClient
from ...runs import locked
from ...weights import EngineAddress, Publisher, check_arrived, complete_folder, write_checkpoint
from ...weights.sharded import is_sharded
from ..collection.advantages import Estimator
from ..collection.collect import collect
from ..collection.credit import CreditReport
from ..collection.groups import Group, GroupRequest, UsableSteps, summarize
from ..collection.recording import Recording, open_recording, step_numbers
from ..collection.samples import to_samples
from ..service import RolloutService
from .convert import REWARD_KEY, SEQUENCE_KEY, SESSION_KEY, ConvertStats, to_trl
from .settings import TrlConfig

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is marked experimental; the version is pinned

try:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError as e:
    raise missing_extra(f"the TRL backend needs {e.name!r}", "trl") from e


class AgentCoreRollouts:
    """TRL's `rollout_func`: prompts in, recorded tokens and rewards out.

    `groups` and `stats` hold the last batch; `on_batch` is called with them after every collection.
    """

    def __init__(
        self,
        config: TrlConfig,
        *,
        client: RolloutClient,
        gateway: GatewayClient,
        on_batch: Callable[[Sequence[Group], ConvertStats], None] | None = None,
        recording: Recording | None = None,
    ) -> None:
        self.recording = recording
        self.rows: list[tuple[Any, Any]] = []  # session and index of the sequence, for each row of the last batch
        self.advantages: dict[tuple[Any, Any], list[float]] = {}  # per token, if they differ
        self.config, self.client, self.gateway = config, client, gateway
        self.on_batch = on_batch
        self.groups: list[Group] = []
        self.stats: ConvertStats | None = None
        self.version: int | None = None  # the version of the engine's weights
        self.publisher: Publisher | None = None
        self._batches = 0
        self._usable_steps = UsableSteps()

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """Collect the rollouts of a batch.

        Raises: RolloutError after several batches in a row without a usable rollout, or at the first batch.
        """
        self.sync_weights(trainer)
        n = self.config.trl.rollouts if trainer.model.training else trainer.num_generations_eval
        groups = collect(
            self._requests(prompts, n, trainer),
            client=self.client,
            gateway=self.gateway,
            config=self.config.collect_config().replace(evaluation=not trainer.model.training),
            weight_version=self.version,
            recording=self._recording(trainer),
        )
        self.groups = [group.within(self.config.max_tokens, sequences=1) for group in groups]
        if self.recording is not None:
            self.recording.masked(self.groups)
        output, stats = to_trl(self.groups, num_generations=n, filler_id=trainer.processing_class.eos_token_id)
        self.stats = stats
        self.rows = list(zip(output[SESSION_KEY], output.pop(SEQUENCE_KEY), strict=True))
        for name, value in {**batch_metrics(self.groups, stats), **self._credit(trainer)}.items():
            trainer._log_metric(f"agentcore/{name}", value)
        if self.on_batch is not None:
            self.on_batch(self.groups, stats)
        if trainer.model.training:
            self._usable_steps.begun |= trainer.state.global_step > 0
            self._usable_steps.check(self.groups)
        return output

    def _credit(self, trainer: Any) -> dict[str, float]:
        """Compute the advantages of tokens, unless TRL gives each rollout one. Return numbers for the step's log."""
        if not (self.config.signals.per_token and trainer.model.training):
            return {}
        report = CreditReport()
        estimator: Estimator = "dr_grpo" if trainer.args.scale_rewards in (False, "none") else "grpo"
        samples = to_samples(self.groups, estimator=estimator, credit=self.config.signals, report=report)
        self.advantages = {(s.session_id, s.sequence_index): s.advantages for s in samples}
        if self.recording is not None:
            trained = [s for s in samples if (s.session_id, s.sequence_index) in self.rows]
            self.recording.advantages(samples, trained=trained)
        return report.numbers()

    def _recording(self, trainer: Any) -> Recording | None:
        """Return this batch's part of the run. Several optimizer steps on one batch are one step of a run."""
        if self.recording is None:
            return None
        step = int(trainer.state.global_step) // _parts(trainer.args)
        return self.recording.at("train" if trainer.model.training else "eval", step)

    def sync_weights(self, trainer: Any) -> None:
        """Publish the trainer's weights if it has stepped since the last time. Versions are optimizer steps.

        Before a batch of rollouts rather than after every optimizer step: several steps may share one batch, and
        nothing samples in between.
        """
        version = int(trainer.state.global_step)
        if version == self.version:
            return
        config = self.config
        main, model = trainer.accelerator.is_main_process, trainer.accelerator.unwrap_model(trainer.model)
        if config.policy_url is not None and (main or is_sharded(model)):
            engine = EngineAddress(
                url=config.policy_url, engine=config.policy_engine, model=config.model_id or "policy"
            )
            if self.publisher is None:  # one for the run: it compares each version with earlier ones
                self.publisher = Publisher(
                    [engine],
                    config.output_dir / "weights",
                    max_gap=config.max_weights_gap,
                    temperature=trainer.temperature,
                )
            self.publisher.publish(model, version, main=main)
        first = self.version is None and trainer.accelerator.is_main_process
        if first and trainer.use_vllm and trainer.temperature != 1.0:
            mode = trainer.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
            if mode != "processed_logprobs":  # TRL only warns
                raise ConfigError(
                    f"vLLM reports {mode}, which are at temperature 1, but training.temperature is "
                    f"{trainer.temperature:g}: start vLLM with --logprobs-mode processed_logprobs"
                )
        if trainer.use_vllm and trainer._last_loaded_step != version:
            # TRL syncs before each batch, so not after the last step; the gateway must not announce weights that are not served.
            trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = version
        trainer.accelerator.wait_for_everyone()
        if trainer.accelerator.is_main_process:
            self.gateway.set_weight_version(version)
        self.version = version

    def _requests(self, prompts: Sequence[str], n: int, trainer: Any) -> list[GroupRequest]:
        if len(prompts) % n:
            raise ConfigError(
                f"a process got {len(prompts)} prompts, which is not a multiple of {n} rollouts per group: make "
                "per_device_train_batch_size * steps_per_generation divisible by num_generations"
            )
        self._batches += 1
        rank = trainer.accelerator.process_index
        requests = []
        for start in range(0, len(prompts), n):
            payload = _decode(prompts[start])
            place = f"{self._batches:05d}-{rank}-{start // n:04d}"
            requests.append(GroupRequest(input_id=f"{place}-{payload_id(payload)}", payload=payload, n=n))
        return requests


class AgentCoreGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose importance ratio is taken against the logprobs recorded at sampling time.

    Without vLLM, TRL 1.16 carries `logprobs` along but compares the new policy with logprobs it recomputes itself, so it
    cannot see a difference between sampler and trainer, or a change of weights during the rollouts.
    """

    def __init__(self, *args: Any, rollouts: AgentCoreRollouts, **kwargs: Any) -> None:
        self.rollouts = rollouts
        super().__init__(*args, rollout_func=rollouts, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does, and then publish the final weights, so that a later evaluation measures them."""
        found = super().train(*args, **kwargs)
        self.rollouts.sync_weights(self)
        return found

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        sampled_BT = output.get("sampling_per_token_logps")
        recomputed_BT = output.get("old_per_token_logps")
        if self.rollouts.config.signals.per_token and self.model.training:  # TRL's loss takes (B, T)
            advantages_BT = torch.zeros(output["completion_mask"].shape, device=output["advantages"].device)
            for b, row in enumerate(self.rollouts.rows):
                known = self.rollouts.advantages.get(row, ())
                advantages_BT[b, : len(known)] = torch.tensor(known)
            output["advantages"] = advantages_BT
        if sampled_BT is not None and not self.use_vllm:
            # None became NaN on tokens that were not sampled; those are masked out of the loss, but 0 * NaN is NaN.
            output["old_per_token_logps"] = torch.nan_to_num(sampled_BT, nan=0.0)
        if sampled_BT is not None:
            recomputed_BT = self._compared(output, sampled_BT, recomputed_BT)
        if self.rollouts.recording is not None:
            self._record(self.rollouts.recording, output, recomputed_BT)
        return output

    def _compared(self, output: Any, sampled_BT: Any, recomputed_BT: Any | None) -> Any | None:
        """Compare recorded with the trainer's logprobs, before any optimizer step since the weights were published.

        TRL has its own logprobs when a batch is for several steps. Otherwise they are computed, unless the weights are
        already proved.
        Returns: the trainer's logprobs. Raises: WeightsError, in every process of the run.
        """
        config = self.rollouts.config
        published = config.policy_url is not None and not is_sharded(self.accelerator.unwrap_model(self.model))
        proved = published or config.max_mean_logprob_gap is None
        if recomputed_BT is None and proved:
            return None
        recomputed_BT = self._recomputed(output) if recomputed_BT is None else recomputed_BT
        mask_BT = (output["completion_mask"] * output["tool_mask"]).bool()
        gaps_N = (recomputed_BT - sampled_BT)[mask_BT].abs().double()
        sums = torch.stack([gaps_N.sum(), mask_BT.sum().double()])
        gap_sum, tokens = self.accelerator.gather(sums).view(-1, 2).sum(dim=0).tolist()
        mean = check_arrived(gap_sum, tokens, self.rollouts.version, config.max_mean_logprob_gap)
        if mean is not None:
            metrics = self._metrics["train" if self.model.training else "eval"]
            metrics["agentcore/logprob_gap_mean"].append(mean)
            if len(gaps_N):
                metrics["agentcore/logprob_gap"].append(float(gaps_N.max()))
        return recomputed_BT

    def _recomputed(self, output: Any) -> Any:
        with torch.no_grad():
            found, *_ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                output["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return found

    def _record(self, recording: Recording, output: Any, recomputed_BT: Any | None) -> None:
        """Add TRL's numbers of the last batch to the run: advantages, and its logprobs if it has them."""
        rows, advantages_B = self.rollouts.rows, output.get("advantages")
        if advantages_B is None or len(advantages_B) != len(rows):
            return
        lengths_B = output["completion_mask"].sum(1).tolist()
        trained_B = (output["completion_mask"] * output["tool_mask"]).sum(1).tolist()
        prompts_B = output["prompt_mask"].sum(1).tolist()
        logprobs = recomputed_BT.tolist() if recomputed_BT is not None else [None] * len(rows)
        for (session_id, sequence), advantage, prompt, length, trained, logprobs_T in zip(
            rows, advantages_B.tolist(), prompts_B, lengths_B, trained_B, logprobs, strict=True
        ):
            if sequence is None:  # a filler row for a rollout that cannot be trained
                continue
            if isinstance(advantage, float):  # otherwise each token has its own
                recording.run.annotate(session_id, advantage=advantage, gradient_tokens=trained * (advantage != 0))
            if logprobs_T is not None:
                found = [*[None] * int(prompt), *logprobs_T[: int(length)]]
                recording.trained(session_id, sequence, logprobs=found, updates=0)


class StepMetrics(TrainerCallback):
    """TRL's logs of a step or an evaluation, as events of a run. Where a batch is for several optimizer steps, each is one."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Delete the rollouts that a run repeats which continues from a checkpoint."""
        if state.is_world_process_zero:
            step = int(state.global_step) // _parts(args)
            self.recording.forget(from_step=step, evaluations_from=step + 1)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.recording.finished(optimizer_steps=int(state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        found = step_numbers(logs or {})
        done, parts = int(state.global_step), _parts(args)
        if "loss" in found:
            self.recording.run.event("step", {"step": (done - 1) // parts, "optimizer_steps": done, **found})
        elif any(name.startswith("eval_") for name in found):
            self.recording.run.event("evaluated", {"step": done // parts, **found})


def _parts(args: Any) -> int:
    """Return the optimizer steps on one batch."""
    return max(1, int(args.steps_per_generation) * int(args.num_iterations) // int(args.gradient_accumulation_steps))


def agent_reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return the agent's rewards, as TRL's reward function. TRL leaves out masked rollouts, whose reward is None."""
    rewards: list[float | None] = columns[REWARD_KEY]
    return rewards


def make_trainer(
    config: TrlConfig,
    *,
    client: RolloutClient,
    gateway: GatewayClient,
    rows: Sequence[Mapping[str, Any]] | None = None,
    model: Any = None,
    tokenizer: Any = None,
    callbacks: Sequence[Any] = (),
    on_batch: Callable[[Sequence[Group], ConvertStats], None] | None = None,
    recording: Recording | None = None,
) -> AgentCoreGRPOTrainer:
    """Return a ready GRPOTrainer. `recording` keeps the rollouts in a run's folder. Raises: ConfigError.

    `rows` are payloads (default: `config.data_path`). `model` and `tokenizer` default to `config.model`.
    """
    if rows is None:
        if config.data_path is None:
            raise ConfigError("no training rows: set data_path or pass rows")
        rows = read_rows(config.data_path)
    rollouts = AgentCoreRollouts(config, client=client, gateway=gateway, on_batch=on_batch, recording=recording)
    return AgentCoreGRPOTrainer(
        model=model if model is not None else config.model,
        reward_funcs=agent_reward,
        args=grpo_config(config),
        train_dataset=_dataset(rows),
        eval_dataset=_dataset(read_rows(config.eval_data_path)) if config.eval_data_path is not None else None,
        processing_class=tokenizer if tokenizer is not None else AutoTokenizer.from_pretrained(config.model),
        peft_config=_lora(config.lora),
        callbacks=list(callbacks),
        rollouts=rollouts,
    )


def batch_metrics(groups: Sequence[Group], stats: ConvertStats) -> dict[str, float]:
    """Return the numbers under ``agentcore/`` in TRL's log: the part of a step's rollouts that reached the loss."""
    summary = summarize(groups)
    metrics: dict[str, float | None] = {
        "usable": stats.usable,
        "masked": stats.rows - stats.usable,
        "failed": summary.lost_rollouts,
        "forked": stats.forked,
        "dropped_sequences": stats.dropped_sequences,
        "dropped_tokens": stats.dropped_tokens,
        "too_long": summary.masked.get("too_long", 0),
        "side_call_tokens": summary.side_call_tokens,
        "other_sampling_tokens": sum(summary.other_sampling.values()),
    }
    counts = {
        "outcome": summary.outcomes,
        "cause": summary.causes,
        "policy_failure": summary.policy_failures,
        "judge": summary.judge,
        "metric": summary.metrics,
    }
    metrics |= {f"{kind}/{name}": n for kind, found in counts.items() for name, n in found.items()}
    metrics |= {"reward_all": summary.score_mean, "reward_ok": summary.ok_mean}
    metrics |= {"trained_token_share": stats.trained_token_share}
    metrics |= {"turns_mean": summary.turns / summary.usable if summary.usable else None}
    return {name: float(value) for name, value in metrics.items() if value is not None}


def grpo_config(config: TrlConfig) -> Any:
    """Return TRL's configuration. Our defaults: no KL term, mean over all tokens, every step logged."""
    training: dict[str, Any] = {
        "num_generations": config.trl.rollouts,
        "beta": 0.0,
        "loss_type": "dapo",
        "report_to": [],
        "save_strategy": "steps" if "save_steps" in config.training else "no",
        "vllm_importance_sampling_mode": "token_truncate",  # masking sequences would drop long ones only because of rounding
        "logging_steps": 1,
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": torch.cuda.is_available(),
        **({"eval_strategy": "steps", "eval_steps": 20} if config.eval_data_path is not None else {}),
        **config.training,
    }
    try:
        return GRPOConfig(output_dir=str(config.output_dir / "trl"), **training)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"`training` does not fit TRL's GRPOConfig: {e}") from e


def train(config: TrlConfig, **arguments: Any) -> AgentCoreGRPOTrainer:
    """Open the clients, train, save the model under ``output_dir/policy`` and return the trainer.

    A run that saved its state continues from the last one.
    """
    with ExitStack() as stack:
        stack.enter_context(locked(config.output_dir))
        settings = config.replace(record_dir=None, gateway_model=config.gateway.gateway_model or config.model)
        service = RolloutService.open(settings, list, config.policy_engine)
        stack.callback(service.close)
        recording = open_recording(config.output_dir, config.shown(), tokenizer=config.model)
        stack.callback(recording.run.close)
        callbacks = [StepMetrics(recording), *arguments.pop("callbacks", ())]
        trainer = make_trainer(
            config,
            client=service.client,
            gateway=service.gateway,
            recording=recording,
            callbacks=callbacks,
            **arguments,
        )
        saved = get_last_checkpoint(trainer.args.output_dir) if Path(trainer.args.output_dir).is_dir() else None
        trainer.train(resume_from_checkpoint=saved)
        save_policy(trainer, Path(config.output_dir) / "policy")
        return trainer


def save_policy(trainer: Any, folder: Path) -> None:
    """Save the model and its tokenizer. Each process of a run calls it."""
    main, model = trainer.accelerator.is_main_process, trainer.accelerator.unwrap_model(trainer.model)
    if is_sharded(model):
        write_checkpoint(model, folder, write=main)
        if main:
            trainer.processing_class.save_pretrained(str(folder))
    else:
        trainer.save_model(str(folder))
    if main:
        complete_folder(folder)


def _dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    return Dataset.from_list([{"prompt": encode_payload(row)} for row in rows])


def _lora(arguments: Mapping[str, Any] | None) -> Any:
    if arguments is None:
        return None
    try:
        from peft import LoraConfig
    except ModuleNotFoundError as e:
        raise MissingExtraError("LoRA needs peft:\n    pip install peft") from e
    try:
        return LoraConfig(**{"task_type": "CAUSAL_LM", "lora_alpha": 2 * arguments.get("r", 8), **arguments})
    except TypeError as e:
        raise ConfigError(f"`lora` does not fit peft's LoraConfig: {e}") from e


def _decode(prompt: object) -> dict[str, Any]:
    payload = json.loads(prompt) if isinstance(prompt, str) else None
    if not isinstance(payload, dict):
        raise ConfigError("a prompt must be the payload as one line of JSON; build the data set with encode_payload")
    return payload

"""verl's agent loop manager over AgentCore, for the V1 trainer (``agent_loop_manager_class``).

The interface of V1 (verl 0.9.1): `generate_sequences` returns at once; for every prompt the manager later writes one
TransferQueue row per sample, key ``{uid}_{session}_{index}``, and only when all of them are written sets the prompt's
own key to "finished" or "failure". The replay buffer drops or refills prompts by these tags. Rollouts run on the
background loop of this process, one collection per prompt, so that groups finish independently.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from ..._installation import missing_extra
from ...client.data import payload_id
from ...errors import CaptureError, RolloutError
from .._portal import portal
from ..collection.advantages import Estimator
from ..collection.groups import CollectedRollout, Group, GroupRequest, summarize
from ..collection.recording import FILTERED
from ..collection.samples import to_samples
from ..service import RolloutService
from .bridge import Bridge
from .convert import to_verl
from .dataset import PAYLOAD_KEY
from .recording import TrainerNumbers
from .settings import ESTIMATOR, AgentCoreConfig, tokenizer_folder

try:
    import torch
    import transfer_queue as tq
    from tensordict import NonTensorData, TensorDict
    from verl.experimental.agent_loop import AgentLoopOutput
    from verl.trainer.ppo.core_algos import register_adv_est
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict
except ModuleNotFoundError as e:
    raise missing_extra(f"the verl backend needs {e.name!r}", "verl") from e

log = logging.getLogger(__name__)

EMPTY_PROMPTS = 64

# verl's estimators that compare the rollouts of a prompt with each other.
_COMPARING = frozenset({"grpo", "grpo_passk", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg"})
_COMPARING |= {"reinforce_plus_plus_baseline"}


@register_adv_est(ESTIMATOR)  # type: ignore[untyped-decorator]  # verl
def take_advantages(token_level_rewards: Any, response_mask: Any, **_: Any) -> tuple[Any, Any]:
    """Return the advantages that come with the tokens: an estimator of verl."""
    advantages = token_level_rewards * response_mask
    return advantages, advantages


def open_service(agentcore: AgentCoreConfig, config: Any, llm_client: Any) -> tuple[RolloutService, Bridge | None]:
    """Open clients and gateway over verl's engines, and the bridge if the gateway samples through `llm_client`."""
    rollout, model = config.actor_rollout_ref.rollout, str(config.actor_rollout_ref.model.path)
    settings = agentcore.service(model)
    if agentcore.gateway_url is not None:
        return RolloutService.open(settings, list, engine="sglang"), None
    bridge = Bridge(llm_client, engine=str(rollout.name))
    window = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
    folder = agentcore.gateway_model or tokenizer_folder(model)
    settings = settings.replace(gateway_model=folder, gateway_context_tokens=int(window))
    return RolloutService.open(settings, lambda: [bridge.open()], engine="sglang", upstream_key=bridge.key), bridge


class AgentCoreManager:
    """Runs the prompts of a batch on AgentCore and hands their samples to V1 as they finish."""

    def __init__(
        self,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> None:
        self.config, self.llm_client = config, llm_client
        self.settings = AgentCoreConfig.of(config)
        self.rollout_config = config.actor_rollout_ref.rollout
        self._service: RolloutService | None = None
        self._bridge: Bridge | None = None
        self._opening: Future[RolloutService] | None = None
        self._running: set[Any] = set()
        self._empty = 0  # prompts in a row without a sample
        self._numbers: TrainerNumbers
        fit = PPOTrainer.fit  # verl calls it with this manager, and has no hook for its end

        @functools.wraps(fit)
        def fitted(*given: Any, **more: Any) -> None:
            fit(*given, **more)
            if self._service is not None and self._service.recording is not None:
                self._service.recording.finished()

        PPOTrainer.fit = fitted

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> AgentCoreManager:
        return cls(*args, **kwargs)

    def service(self) -> RolloutService:
        """Return the clients, opened with the first batch, when verl's engines run. Block while the gateway starts."""
        if self._service is None:
            self._service, self._bridge = open_service(self.settings, self.config, self.llm_client)
        correction = self.config.algorithm.get("rollout_correction") or {}
        assert self._service.recording is not None  # `translate` names its folder
        self._numbers = TrainerNumbers(
            self._service.recording,
            own_logprobs=not correction.get("bypass_mode", False),
            max_mean_gap=self.settings.max_mean_logprob_gap,
        )
        return self._service

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Start all prompts of the batch and return. Those of the first wait for the gateway, not the trainer.

        Raises: RolloutError after `EMPTY_PROMPTS` prompts in a row without a sample: verl would request others forever;
        GatewayError or ConfigError when the gateway could not be started for an earlier batch, whose prompts all failed.
        """
        if self._empty >= EMPTY_PROMPTS:
            raise RolloutError(f"the last {self._empty} prompts gave no sample; the log names the reasons")
        if self._opening is None:
            self._opening = portal.submit(asyncio.to_thread(self.service))
        elif self._opening.done() and (error := self._opening.exception()) is not None:
            raise error
        for row in rows_of(prompts):
            future = portal.submit(self._prompt(self._opening, row))
            self._running.add(future)
            future.add_done_callback(self._running.discard)

    async def _prompt(self, opening: Future[RolloutService], row: dict[str, Any]) -> None:
        validate = bool(row.pop("validate", False))
        uid, partition = str(row["uid"]), "val" if validate else "train"
        await asyncio.to_thread(tq.kv_put, key=uid, partition_id=partition, tag={"status": "running"})
        status = "failure"
        try:
            service = await asyncio.shield(asyncio.wrap_future(opening))
            step = None if row.get("global_steps") is None else int(row["global_steps"])
            if step is not None:  # a validation before training has the number of the step before
                service.begins(step + validate, evaluations_from=step)
            phase = "eval" if validate else "train"
            group = await service.group(self._request(row, uid, validate), phase=phase, step=step)
            written = await asyncio.to_thread(self._write, group, row, uid, partition)
            status = "finished" if written else "failure"
            if not written:
                stats = summarize([group])
                log.warning("prompt %s gave no sample: %s %s", uid, dict(stats.outcomes), dict(stats.causes))
            if not validate:
                self._empty = 0 if written else self._empty + 1
        except Exception:  # the trainer waits for a final tag of every prompt, also after an error
            log.exception("prompt %s failed", uid)
        finally:
            await asyncio.to_thread(tq.kv_put, key=uid, partition_id=partition, tag={"status": status})

    def _request(self, row: dict[str, Any], uid: str, validate: bool) -> GroupRequest:
        section = self.rollout_config.val_kwargs if validate else self.rollout_config
        params = {k: section.get(k) for k in ("temperature", "top_p", "top_k")}
        if row.pop("__do_sample__", True) is False:
            params = {"temperature": 0.0}
        payload = row[PAYLOAD_KEY]
        return GroupRequest(
            input_id=f"{payload_id(payload)}-{uid}",
            payload=dict(payload),
            n=int(row.pop("__rollout_n__", section.n)),
            # Without absent and neutral values. OpenAI's clients do not have verl's other parameters.
            sampling_params={k: v for k, v in params.items() if v is not None and (k, v) != ("top_k", -1)},
        )

    def _write(self, group: Group, row: Mapping[str, Any], uid: str, partition: str) -> int:
        keys, fields, tags = [], [], []
        training, step = partition == "train", row.get("global_steps")
        made_of = [(rollout, outputs) for rollout in group.usable if (outputs := self._outputs(rollout, step))]
        if training and self.config.algorithm.adv_estimator in _COMPARING and 2 > len(made_of) < len(group.rollouts):
            # Without others to compare with, verl would use the reward as the advantage.
            for rollout, _ in made_of:
                self._numbers.left_out(rollout.session_id, FILTERED)
            return 0
        advantages = self._advantages(replace(group, rollouts=[rollout for rollout, _ in made_of])) if training else {}
        for rollout, outputs in made_of:
            for index, output in enumerate(outputs):
                keys.append(f"{uid}_{rollout.index}_{index}")
                if training:
                    self._numbers.wrote(keys[-1], output)
                fields.append(_fields(AgentLoopOutput(**output), row, rollout.index))
                if advantages:  # verl's field for numbers of tokens, which `take_advantages` reads
                    branch = output["extra_fields"]["agentcore_branch"]
                    fields[-1]["rm_scores"] = torch.tensor(advantages[rollout.session_id, branch])
                tags.append(_tag(fields[-1], row))
        if keys:
            table = list_of_dict_to_tensordict(fields)
            tq.kv_batch_put(keys=keys, fields=table, tags=tags, partition_id=partition)
        return len(keys)

    def _advantages(self, group: Group) -> dict[tuple[str, int], list[float]]:
        """Return the advantages of each token, if verl does not compute one per rollout."""
        if not self.settings.signals.per_token:
            return {}
        estimator: Estimator = "grpo" if self.config.algorithm.get("norm_adv_by_std_in_grpo", True) else "dr_grpo"
        samples = to_samples([group], estimator=estimator, credit=self.settings.signals)
        return {(s.session_id, s.sequence_index): s.advantages for s in samples}

    def _outputs(self, rollout: CollectedRollout, step: Any) -> list[dict[str, Any]]:
        """Return the samples of a usable rollout. With routing replay, return none if one has no expert routing that fits."""
        replays = bool(self.rollout_config.get("enable_rollout_routing_replay"))
        limits = {name: self.rollout_config[name] for name in ("prompt_length", "response_length")}
        shape = self._bridge.expert_shape if replays and self._bridge is not None else None
        try:
            outputs = to_verl(rollout, **limits, expert_shape=shape, step=step)
            if replays and any("routed_experts" not in output for output in outputs):
                raise CaptureError("the engine returned no expert routing", session_id=rollout.session_id)
        except CaptureError as e:
            log.warning("rollout %s cannot be replayed: %s", rollout.session_id, e)
            return []
        if not outputs:
            self._numbers.left_out(rollout.session_id, "too_long")
            log.warning(
                "rollout %s is masked: it is longer than %s of actor_rollout_ref.rollout", rollout.session_id, limits
            )
        return outputs


def rows_of(prompts: TensorDict) -> list[dict[str, Any]]:
    return [
        {name: value.data if isinstance(value, NonTensorData) else value for name, value in prompts[i].items()}
        for i in range(len(prompts))
    ]


def _fields(made: Any, row: Mapping[str, Any], session: int) -> dict[str, Any]:
    fields: dict[str, Any] = made.as_dict()
    fields.update(row)
    fields["session_id"] = session
    fields["loss_mask"] = fields["response_mask"]
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]])
    fields["position_ids"] = torch.arange(len(fields["input_ids"]))
    fields["multi_modal_inputs"] = {}
    return fields


def _tag(fields: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    prompt, response = len(fields["prompts"]), len(fields["responses"])
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": row.get("global_steps"),
        "min_global_steps": fields["extra_fields"]["min_global_steps"],
        "max_global_steps": fields["extra_fields"]["max_global_steps"],
    }

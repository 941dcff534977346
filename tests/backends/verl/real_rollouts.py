"""Run by test_real_verl.py in an environment that has verl 0.9.x: real_run.py's two cases, and sessions of the math agent as
verl's V1 trainer asks for them. One process and one Ray for all of it, because starting them is most of the work.

First argument: a JSON file that says where things are. Second: the folder in which each case leaves a JSON file.

Of the sessions verl's own are: configuration, load balancer, `FullyAsyncLLMServerClient`, TransferQueue, the loading of our
manager. A Ray actor with the interface of verl's rollout servers samples from the built-in policy; while agents run it aborts
what is in flight and counts its version up, as an update of the weights does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from real_run import WAIT_S, _objects, _wait_for_prompts, composed, manager, rows_of, start_ray, tiny_model

from agentcore_rl_toolkit.backends.verl.dataset import PAYLOAD_KEY, PayloadDataset

PROMPTS, N, STEP = 2, 4, 5  # the trainer is at step 5; the servers have the weights of step 4
DELAY_S = 0.3  # long enough for the abort to find calls in flight


class Server:
    """verl's rollout server as its client calls it, over the built-in policy."""

    def __init__(self, folder: str) -> None:
        from agentcore_rl_toolkit.policy.engine import Engine

        self.engine = Engine.from_directory(folder, seed=11).start()
        self.global_steps = STEP - 1
        self.running: set[Any] = set()
        self.journal: list[dict[str, Any]] = []

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        from agentcore_rl_toolkit.policy.batch import Generation
        from agentcore_rl_toolkit.policy.sampling import SamplingParams

        loop, done = asyncio.get_running_loop(), asyncio.Event()
        params = SamplingParams(
            temperature=sampling_params.get("temperature", 1.0),
            max_tokens=sampling_params["max_tokens"],
            stop_token_ids=tuple(sampling_params.get("stop_token_ids") or ()),
        )
        made = Generation(
            prompt_ids=list(prompt_ids),
            params=params,
            listener=lambda g: loop.call_soon_threadsafe(done.set) if g.finish_reason else None,
        )
        self.running.add(made)
        version = self.global_steps  # of all its tokens: an update aborts what runs
        await asyncio.sleep(DELAY_S)
        if not made.cancelled:
            self.engine.submit([made])
            await done.wait()
        self.running.discard(made)
        self.journal.append(
            {"prompt": made.prompt_ids, "ids": made.token_ids, "logprobs": made.logprobs, "version": version}
        )
        return TokenOutput(
            token_ids=made.token_ids,
            log_probs=made.logprobs,
            stop_reason="aborted" if made.cancelled else "completed",
            extra_fields={"global_steps": version},
        )

    async def update_weights(self) -> int:
        """Abort what runs and take the next version. Returns how many calls were cut."""
        cut = list(self.running)
        for made in cut:
            self.engine.cancel(made)
        await asyncio.sleep(0.1 if cut else 0)
        self.global_steps += bool(cut)
        return len(cut)

    async def written(self) -> list[dict[str, Any]]:
        return self.journal


def main() -> None:
    import transfer_queue as tq

    place, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    folder = tiny_model(out / "model")
    start_ray()
    try:
        units = "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"
        tq.init(composed(folder, units).transfer_queue)
        keep(out, "manager", manager(folder))
        keep(out, "rollouts", rollouts(place))
        tq.close()
    finally:
        ray.shutdown()


def keep(out: Path, case: str, found: dict[str, Any]) -> None:
    (out / f"{case}.json").write_text(json.dumps(found, default=str))


def rollouts(place: dict[str, Any]) -> dict[str, Any]:
    """Sessions of the math agent for two prompts, for training and for validation, and a step of verl's loss on them."""
    import transfer_queue as tq
    from verl.utils import tensordict_utils as tu
    from verl.utils.import_utils import load_class_from_fqn
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    config = composed(
        Path(place["policy"]),
        f"actor_rollout_ref.rollout.n={N}",
        "actor_rollout_ref.rollout.prompt_length=300",
        "actor_rollout_ref.rollout.response_length=300",
        "trainer.v1.trainer_mode=colocate_async",
        *(f"agentcore.{key}={value}" for key, value in place["agentcore"].items()),
    )
    server = ray.remote(Server).options(num_cpus=0).remote(place["policy"])
    balancer = ray.remote(GlobalRequestLoadBalancer).options(num_cpus=0).remote(servers={"policy:1": server})
    made = load_class_from_fqn(
        config.actor_rollout_ref.rollout.agent.agent_loop_manager_class, "AgentLoopManager"
    ).create(
        config=config,
        llm_client=FullyAsyncLLMServerClient(config, load_balancer_handle=balancer),
        teacher_client=None,
        reward_loop_worker_handles=None,
    )
    returned = hold_the_gateway()
    dataset = PayloadDataset(place["rows"])
    found = {"train": {}, "val": {}}
    for partition in ("train", "val"):
        batch = tu.get_tensordict(
            {
                "raw_prompt": _objects([dataset[i]["raw_prompt"] for i in range(PROMPTS)]),
                PAYLOAD_KEY: _objects([dataset[i][PAYLOAD_KEY] for i in range(PROMPTS)]),
                "index": np.arange(PROMPTS),
                "uid": _objects([f"{partition}{i}" for i in range(PROMPTS)]),
            }
        )
        tu.assign_non_tensor_data(batch, "global_steps", STEP)
        if partition == "val":
            tu.assign_non_tensor_data(batch, "validate", True)
        uids = list(batch["uid"])
        tags = [{"is_prompt": True, "status": "pending", "global_steps": STEP}] * PROMPTS
        tq.kv_batch_put(keys=uids, partition_id=partition, tags=tags)
        cut: list[int] = []
        updating = threading.Thread(target=update_when_busy, args=(server, cut))
        if partition == "train":
            updating.start()
        made.generate_sequences(batch)
        returned.set()
        listed = _wait_for_prompts(tq, uids, partition)
        if partition == "train":
            updating.join()
        keys = rows_of(uids, listed)
        data = tq.kv_batch_get(keys=keys, partition_id=partition)
        names = ("input_ids", "response_mask", "rollout_log_probs", "rm_scores")
        if partition == "train":
            found["loss"] = train_step(config, place["policy"], keys, data)
            found["arrival"] = arrival(config, place["policy"], keys, [listed[k] for k in keys])
        found[partition] = {
            "keys": keys,
            "status": {u: listed[u]["status"] for u in uids},
            "tags": [listed[k] for k in keys],
            "cut": sum(cut),
            **{name: [data[name][i].tolist() for i in range(len(keys))] for name in names},
        }
    found["sampled"] = ray.get(server.written.remote())
    made._service.close()
    return found


def hold_the_gateway() -> threading.Event:
    """Have the gateway start when this is set: a trainer that waits for it would wait for ever, and its prompts fail."""
    from agentcore_rl_toolkit.backends.verl import manager as module

    returned, started = threading.Event(), module.open_service

    def late(*args: Any) -> Any:
        if not returned.wait(WAIT_S):
            raise TimeoutError("generate_sequences waits for the gateway")
        return started(*args)

    module.open_service = late
    return returned


def train_step(config: Any, policy: str, keys: list[str], data: Any) -> dict[str, float]:
    """One step on the rows with verl's advantages, verl's loss and its actor's settings, on the weights that sampled them."""
    from transformers import AutoModelForCausalLM
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
    from verl.utils.config import omega_conf_to_dataclass

    torch.set_num_threads(1)
    proto = DataProto(batch=data.select("response_mask", "rm_scores", "rollout_log_probs").to_padded_tensor())
    proto.batch["token_level_rewards"] = proto.batch["rm_scores"]
    proto.non_tensor_batch["uid"] = _objects([key.rsplit("_", 2)[0] for key in keys])
    proto = compute_advantage_for_multi_trajectories(proto, keys, adv_estimator="grpo", num_repeat=N)
    mask_BT, sampled_BT = proto.batch["response_mask"], proto.batch["rollout_log_probs"]
    model = AutoModelForCausalLM.from_pretrained(policy)
    rows = []
    for i in range(len(keys)):
        ids_T, response = data["input_ids"][i], len(data["response_mask"][i])
        logprobs_TV = torch.log_softmax(model(input_ids=ids_T[None]).logits[0, :-1].float(), -1)
        now_T = logprobs_TV.gather(1, ids_T[1:, None])[-response:, 0]
        rows.append(torch.nn.functional.pad(now_T, (0, mask_BT.shape[1] - response)))
    now_BT = torch.stack(rows)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    # Where all rewards of a group are equal GRPO has nothing to learn; the gradient is to be seen in any case.
    advantages_BT = proto.batch["advantages"] + mask_BT
    loss, metrics = get_policy_loss_fn("vanilla")(
        old_log_prob=sampled_BT, log_prob=now_BT, advantages=advantages_BT, response_mask=mask_BT, config=actor
    )
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=1e-4).step()
    return {
        "furthest": float(((now_BT - sampled_BT).abs() * mask_BT).max()),
        "loss": float(loss),
        "gradient": float(norm),
        "kl": float(metrics["actor/ppo_kl"]),
    }


def arrival(config: Any, policy: str, keys: list[str], tags: list[dict[str, Any]]) -> dict[str, Any]:
    """What the start of a step says, in verl's own code, where engine and trainer have the same weights, and where they have not.

    "first": one tensor as vLLM leaves it that starts without weights, which is how verl starts it, when the transfer leaves that
    tensor out. "one step": one tensor as it was an optimizer step ago; "all": all of them. verl's actor needs a GPU, so the
    model computes here what it would.
    """
    import transfer_queue as tq
    from tensordict import TensorDict
    from transformers import AutoModelForCausalLM
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from agentcore_rl_toolkit.errors import WeightsError

    model = AutoModelForCausalLM.from_pretrained(policy)
    sampled = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    class Actor:
        def compute_log_prob(self, batch: Any) -> Any:
            rows = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["input_ids"])["input_ids"]
            logprobs, entropies = [], []
            for ids_T in rows.unbind():
                with torch.no_grad():
                    logprobs_TV = torch.log_softmax(model(input_ids=ids_T[None]).logits[0].float(), -1)
                next_T = torch.nn.functional.pad(ids_T[1:], (0, 1))  # what stands behind the last token is not read
                logprobs.append(logprobs_TV.gather(1, next_T[:, None])[:, 0])
                entropies.append(-(logprobs_TV.exp() * logprobs_TV).sum(-1))
            columns = {"log_probs": logprobs, "entropy": entropies}
            fields = {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in columns.items()}
            tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=TensorDict(fields, batch_size=len(rows)))
            return batch

    def answer(**replaced: torch.Tensor) -> str:
        """How the step begins when the trainer has these tensors in place of those that sampled; empty if it goes on."""
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                tensor.copy_(replaced.get(name, sampled[name]))
        trainer = SimpleNamespace(config=config, actor_rollout_wg=Actor())
        try:
            PPOTrainer._compute_old_log_prob(trainer, tq.KVBatchMeta(keys, tags, "train"), metrics)
        except WeightsError as e:
            return str(e)
        return ""

    metrics: dict[str, float] = {}
    torch.manual_seed(7)
    same = {"said": answer(), **metrics}
    first = {name: answer(**{name: torch.empty_like(t).uniform_(-1e-3, 1e-3)}) for name, t in sampled.items()}
    return {"same": same, "first": first}


def update_when_busy(server: Any, cut: list[int]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not cut and time.monotonic() < give_up_s:
        n = ray.get(server.update_weights.remote())
        if n:
            cut.append(n)
        time.sleep(0.05)


if __name__ == "__main__":
    os.environ["RAY_AUTH_MODE"] = "disabled"
    code = 1
    try:
        main()
        code = 0
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # the background loop of the manager has no end of its own

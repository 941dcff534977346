"""For real_rollouts.py, in an environment that has verl 0.9.x: our manager for the V1 trainer on Ray.

It gives what it found; the assertions are in test_real_verl.py.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import verl
from hydra import compose, initialize_config_dir
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config

from agentcore_rl_toolkit.backends.service import RolloutService
from agentcore_rl_toolkit.backends.verl.dataset import PAYLOAD_KEY, PayloadDataset
from agentcore_rl_toolkit.backends.verl.settings import AgentCoreConfig, translate
from agentcore_rl_toolkit.errors import RolloutError, WeightsError
from agentcore_rl_toolkit.runs import Query, RunReader, TokenSequence
from agentcore_rl_toolkit.runs.folder import status

sys.path.append(str(Path(__file__).parents[1]))
from recorded import Replay, recorded_episodes

PROMPTS = 5
ROUNDING, OTHER_WEIGHTS = 0.125, 0.5  # by how much verl's logprobs differ from the recorded ones; exact in float32
WAIT_S = 330  # a little more than a rollout may take
ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math"
SECTION = {"agent_runtime_arn": ARN, "s3_bucket": "memory://records", "exp_id": "verl"}


def tiny_model(folder: Path) -> Path:
    """A folder verl can read a tokenizer and a model configuration from."""
    # verl looks up the turn markers of the model's family by name.
    words = {f"w{i}": i for i in range(508)} | {"<|im_start|>": 508, "<|im_end|>": 509, "<pad>": 510, "<end>": 511}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="<end>", pad_token="<end>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return folder


def composed(folder: Path, *more: str) -> Any:
    """verl's configuration with the overrides our `main` makes."""
    arguments = [f"agentcore.{k}={v}" for k, v in SECTION.items()]
    _, theirs = translate([*arguments, f"actor_rollout_ref.model.path={folder}", *more], environ={})
    config_dir = os.path.join(os.path.dirname(verl.__file__), "trainer/config")
    with initialize_config_dir(config_dir=config_dir, version_base=None):
        return compose(config_name="ppo_trainer", overrides=theirs)


def service(replay: Replay, record_dir: Path | None = None) -> RolloutService:
    section = SECTION | ({} if record_dir is None else {"record_dir": str(record_dir)})
    return RolloutService(AgentCoreConfig(**section).service("tiny"), replay.client, replay.gateway)


def manager(folder: Path) -> dict[str, Any]:
    """On a running Ray and TransferQueue: verl loads our manager by name, it writes rows, we read them as the trainer would."""
    import transfer_queue as tq
    from verl.protocol import DataProto
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
    from verl.utils import tensordict_utils as tu
    from verl.utils.import_utils import load_class_from_fqn

    config = composed(
        folder,
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.prompt_length=256",
        "actor_rollout_ref.rollout.response_length=256",
    )
    name = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    made = load_class_from_fqn(name, "AgentLoopManager").create(
        config=config, llm_client=None, teacher_client=None, reward_loop_worker_handles=None
    )
    good = recorded_episodes(24)
    bad = [e for e in recorded_episodes(640) if e.kind == "lost"][:15]
    # Prompts run side by side, so each gets its episodes by name: row i has id i and uid u{i}. The last has one good rollout.
    entries = [*good, *bad[:8], good[0], *bad[8:]]
    episodes = [replace(e, input_id=f"{i // 8}-u{i // 8}") for i, e in enumerate(entries)]
    replay = Replay(episodes)
    made._service = service(replay, folder / "run")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"idx": i, "prompt": f"task {i}"}) + "\n" for i in range(PROMPTS)))
    dataset = PayloadDataset(str(rows))
    batch = tu.get_tensordict(
        {
            "raw_prompt": _objects([dataset[i]["raw_prompt"] for i in range(PROMPTS)]),
            PAYLOAD_KEY: _objects([dataset[i][PAYLOAD_KEY] for i in range(PROMPTS)]),
            "index": np.arange(PROMPTS),
            "uid": _objects([f"u{i}" for i in range(PROMPTS)]),
        }
    )
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    uids = list(batch["uid"])
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 1}] * PROMPTS
    tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
    began_s = time.monotonic()
    made.generate_sequences(batch)
    returned_s = time.monotonic() - began_s
    listed = _wait_for_prompts(tq, uids)
    keys = rows_of(uids, listed)
    data = tq.kv_batch_get(keys=keys, partition_id="train")
    proto = DataProto(batch=data.select("response_mask", "rm_scores").to_padded_tensor())
    proto.batch["token_level_rewards"] = proto.batch["rm_scores"]
    proto.non_tensor_batch["uid"] = _objects([k.rsplit("_", 2)[0] for k in keys])
    with_advantages = compute_advantage_for_multi_trajectories(proto, keys, adv_estimator="grpo", num_repeat=8)
    mask = with_advantages.batch["response_mask"]
    first = mask.argmax(dim=1)
    advantages = with_advantages.batch["advantages"][torch.arange(len(keys)), first]
    recorded = run_folder(tq, made._service, made._numbers, keys, data, with_advantages, folder / "run")
    # verl's own `fit`, to the end of a run that only validates; its workers need a GPU.
    trainer = SimpleNamespace(
        config=composed(folder, "trainer.val_only=true", "trainer.logger=[console]"),
        global_steps=0,
        on_validate_begin=lambda: None,
        _validate=lambda: {"val-core/math/reward": 0.5},
        on_validate_end=lambda: None,
        _shutdown_dump_executor=lambda: None,
    )
    made._service.recording.run.close()
    before = status(folder / "run")
    PPOTrainer.fit(trainer, agent_loop_manager=made)
    made._empty = 64
    try:
        made.generate_sequences(batch)
        ended = ""
    except RolloutError as e:
        ended = str(e)
    return {
        "without_gateway": without_gateway(
            type(made)(composed(folder, "agentcore.gateway_model=/nowhere"), None), batch, uids
        ),
        "ended": ended,
        "run": [before, status(folder / "run")],
        "recorded": recorded,
        "returned_s": returned_s,
        "status": {str(uids.index(u)): listed[u]["status"] for u in uids},
        "rows": {k.replace(k.rsplit("_", 2)[0], str(uids.index(k.rsplit("_", 2)[0]))): i for i, k in enumerate(keys)},
        "input_ids": [data["input_ids"][i].tolist() for i in range(len(keys))],
        "response_mask": [data["response_mask"][i].tolist() for i in range(len(keys))],
        "logprobs": [data["rollout_log_probs"][i].tolist() for i in range(len(keys))],
        "advantages": advantages.tolist(),
        "tags": [listed[k] for k in keys],
    }


def run_folder(
    tq: Any, opened: RolloutService, numbers: Any, keys: list[str], data: Any, proto: Any, folder: Path
) -> dict[str, Any]:
    """What the run has of a step which ends as V1 ends it: its numbers beside the rows, logged, and the rows removed.

    The rows of u2 are dropped before they are trained on. Those of u1 are the next step, sampled from other weights than verl's.
    """
    from tensordict import TensorDict
    from verl.utils.tracking import Tracking
    from verl.workers.utils.padding import response_to_nested

    complaints: list[str] = []
    received = logging.Handler()
    received.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("agentcore_rl_toolkit.backends.verl.recording").addHandler(received)
    tq.kv_clear(keys=[key for key in keys if key.startswith("u2_")], partition_id="train")
    whole = response_to_nested(proto.batch["advantages"], data["response_mask"])

    def put(columns: dict[str, list[torch.Tensor]], keys: list[str]) -> None:
        fields = {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in columns.items()}
        tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(fields, batch_size=len(keys)))

    def compute(step: list[int], gap: float) -> tuple[list[str], dict[str, list[torch.Tensor]]]:
        sampled = [data["rollout_log_probs"][i] for i in step]
        own = {"old_log_probs": [row + gap for row in sampled], "entropy": [row * 0 + 1.5 for row in sampled]}
        return [keys[i] for i in step], own

    first = [i for i, key in enumerate(keys) if not key.startswith(("u1_", "u2_"))]
    step, own = compute(first, ROUNDING)
    # A row that waited for a step: verl has learnt since, and its logprobs are far from the recorded ones.
    old = min(row.version for row in numbers._rows.values() if row.version is not None) - 1
    extra = {"agentcore_session": "late", "agentcore_branch": 0, "min_global_steps": old}
    late = {"prompt_ids": [1], "response_mask": [1, 1], "response_logprobs": [-1.0, -1.0], "extra_fields": extra}
    numbers.wrote("late_0_0", late)
    put({"response_mask": [torch.tensor([1, 1])]}, ["late_0_0"])
    step.append("late_0_0")
    own["old_log_probs"].append(torch.tensor([-1e6, -1e6]))
    own["entropy"].append(torch.tensor([1.5, 1.5]))
    put(own, step)
    put({"advantages": [*(whole[i] for i in first), torch.tensor([0.5, 0.5])]}, step)
    tq.kv_clear(keys=step, partition_id="train")
    tracking = Tracking("project", "experiment", ["console"])
    tracking.log(data={"val-core/math/reward": 0.5}, step=0)
    tracking.log(data={"actor/pg_loss": -0.5, "timing_s/gen": 3.0, "timing_s/step": 4.0, "note": "x"}, step=1)
    second = [i for i, key in enumerate(keys) if key.startswith("u1_")]
    step, own = compute(second, OTHER_WEIGHTS)
    try:
        put(own, step)
        ended = ""
    except WeightsError as e:
        ended = str(e)
    with RunReader(folder) as run:  # nobody flushed it but what ended the run
        kept = sum(row["entropy_mean"] is not None for row in run.rollouts(Query(phase="train")))
    # A run is over here. This one goes on, so that its folder has the columns of every row.
    put({"advantages": [whole[i] for i in second]}, step)
    tq.kv_clear(keys=step, partition_id="train")
    assert opened.recording is not None
    assert opened.recording.run.flush()
    with RunReader(folder) as run:
        found: dict[str, Any] = {}
        for row in run.rollouts(Query(phase="train")):
            whole = run.rollout(row["id"]) or {}
            sequences = [TokenSequence.decoded(s) for s in whole.get("sequences") or ()]
            found[f"{row['grp']}/{row['place']}"] = {
                "advantage": row["advantage"],
                "mask_reason": row["mask_reason"],
                "entropy": row["entropy_mean"],
                "gaps": [
                    [b - a for a, b in zip(s.logprobs, s.trainer_logprobs, strict=True) if None not in (a, b)]
                    for s in sequences
                    if s.logprobs is not None and s.trainer_logprobs is not None
                ],
                "trained": [sum(s.mask) for s in sequences if any(s.mask)],  # side calls are recorded untrained
            }
        return {
            "rows": found,
            "events": run.metrics(),
            "complaints": complaints,
            "folder": str(folder),
            "ended": ended,
            "kept": kept,
        }


def without_gateway(made: Any, batch: Any, uids: list[str]) -> dict[str, Any]:
    """What a trainer sees of a manager whose gateway cannot be started: there is no such model."""
    import transfer_queue as tq
    from verl.utils import tensordict_utils as tu

    tags = [{"is_prompt": True, "status": "pending", "global_steps": 1}] * PROMPTS
    tq.kv_batch_put(keys=uids, partition_id="val", tags=tags)
    batch = batch.clone()
    tu.assign_non_tensor_data(batch, "validate", True)
    made.generate_sequences(batch)
    listed = _wait_for_prompts(tq, uids, "val")
    try:
        made.generate_sequences(batch)
        raised = ""
    except Exception as e:
        raised = type(e).__name__
    return {"status": [listed[u]["status"] for u in uids], "raised": raised}


def start_ray() -> None:
    """A Ray of our own, whatever clusters run here. It gives its helpers 30 s to start, which a busy machine does not always
    manage: then once more.
    """
    import ray

    for left in (3, 2, 1, 0):
        try:
            ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
            return
        except Exception as e:
            ray.shutdown()
            if not left or "timed out during startup" not in str(e):
                raise


def rows_of(uids: list[str], listed: dict[str, Any]) -> list[str]:
    """Keys of the rows of these prompts, in order; other prompts may lie in the same partition."""
    return sorted(key for key in listed if key not in uids and key.rsplit("_", 2)[0] in uids)


def _objects(values: list[Any]) -> np.ndarray:
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def _wait_for_prompts(tq: Any, uids: list[str], partition: str = "train") -> dict[str, Any]:
    give_up_s = time.monotonic() + WAIT_S
    while time.monotonic() < give_up_s:
        listed: dict[str, Any] = tq.kv_list(partition)[partition]
        if all(listed.get(u, {}).get("status") in ("finished", "failure") for u in uids):
            return listed
        time.sleep(0.1)
    raise TimeoutError("not every prompt got a final status")

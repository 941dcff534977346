"""Run by test_real_slime.py with slime's Python: slime's own argument parser, rollout functions and RolloutManager.

Everything is slime's: `parse_args`, the data source with its buffer, the SGLang router, scheduling, aborts, evaluation,
conversion to training data and its schedule over ranks. The engine behind the router is the built-in policy in SGLang's
wire format; the rollouts are sessions of the math agent on the local runtime. Ray is left out: the manager is made in
this process, without its actors.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

from agentcore_rl_toolkit.backends.slime import SlimeRunner, trained
from agentcore_rl_toolkit.backends.slime.convert import NOTE

ENGINE_GROUPS = 2


def parsed(place: dict[str, Any], runner: SlimeRunner, *more: str) -> Any:
    """slime's arguments from the command line that `SlimeRunner` writes."""
    runner._write_inputs()
    sys.argv = ["train.py", *runner.flags(4), "--debug-rollout-only", *more]
    sys.argv += ["--rollout-external-engine-addrs", place["engine"]]
    from slime.utils.arguments import parse_args

    return parse_args()


def plain(sample: Any) -> dict[str, Any]:
    note = sample.metadata.get(NOTE, {})
    return {
        "index": sample.index,
        "group": sample.group_index,
        "rollout_id": sample.rollout_id,
        "tokens": sample.tokens,
        "response_length": sample.response_length,
        "loss_mask": sample.loss_mask,
        "logprobs": sample.rollout_log_probs,
        "reward": sample.reward,
        "status": sample.status.value,
        "removed": sample.remove_sample,
        "outcome": note.get("outcome"),
        "error": note.get("error"),
        "session": note.get("session_id"),
        "weight_versions": sample.weight_versions,
        "response": sample.response,
    }


def main() -> None:
    place, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    runner = SlimeRunner(**place["runner"])
    args = parsed(
        place, runner, "--partial-rollout", "--over-sampling-batch-size", str(2 * ENGINE_GROUPS), "--log-passrate"
    )
    from agentcore_rl_toolkit.backends.slime import generate as ours

    manager = manager_of(args, place)
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("step0", lambda: step(manager, 0)),
        ("eval", lambda: evaluate(manager, 0)),
        ("version", lambda: post(place, "/update_weight_version", {"new_version": "7"})),
        ("step1", lambda: from_buffer(manager)),
        ("fully_async", lambda: fully_async(manager, place)),
        ("forked", lambda: forked(manager)),
    ]
    found: dict[str, Any] = {"args": {k: getattr(args, k) for k in runner.rollout_settings()}}
    service = ours.rollouts(args)
    for name, run in steps:
        began_s = time.monotonic()
        found[name] = run()
        print(f"{name}: {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)
    service.close()
    trained.take_rest(runner.record_folder)
    found["run"] = str(runner.record_folder)
    out.write_text(json.dumps(found))
    for child in multiprocessing.active_children():  # slime's router
        child.kill()
    os._exit(0)  # slime's worker and event-loop threads have no end of their own


def manager_of(args: Any, place: dict[str, Any]) -> Any:
    """slime's RolloutManager with what its constructor makes, but for Ray actors; its router has the engine as worker."""
    from slime.ray.rollout import RolloutManager, _start_router
    from slime.utils.http_utils import init_http_client
    from slime.utils.misc import load_function

    args.sglang_router_ip, args.sglang_router_port = _start_router(args)
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    requests.post(
        f"{router}/workers", json={"url": place["engine"], "worker_type": "regular"}, timeout=30
    ).raise_for_status()
    give_up_s = time.monotonic() + 60
    while not requests.get(f"{router}/workers", timeout=30).json().get("workers"):
        assert time.monotonic() < give_up_s, "the router does not take the engine"
        time.sleep(0.2)
    init_http_client(args)
    cls = RolloutManager.__ray_metadata__.modified_class
    manager = cls.__new__(cls)
    manager.args = args
    manager.data_source = load_function(args.data_source_path)(args)
    manager.generate_rollout = load_function(args.rollout_function_path)
    manager.eval_generate_rollout = load_function(args.eval_function_path)
    manager.custom_reward_post_process_func = load_function(args.custom_reward_post_process_path)
    manager.custom_convert_samples_to_train_data_func = None
    return manager


def post(place: dict[str, Any], path: str, body: dict[str, Any]) -> Any:
    return requests.post(place["engine"] + path, json=body, timeout=30).json()


def step(manager: Any, rollout_id: int) -> dict[str, Any]:
    """What RolloutManager.generate does, with the samples kept."""
    samples, metrics = manager._get_rollout_data(rollout_id=rollout_id)
    from slime.observability.rollout_metrics import log_rollout_data

    log_rollout_data(rollout_id, manager.args, samples, metrics, 1.0)
    train = manager._convert_samples_to_train_data(samples)
    from slime.utils.dp_schedule import build_dp_schedule

    partitions, _, microbatches, _ = build_dp_schedule(
        manager.args,
        {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1},
        [len(t) for t in train["tokens"]],
        global_batch_size=manager.args.global_batch_size,
        rollout_indices=train["rollout_ids"],
    )
    write_trained(manager, rollout_id, train, partitions, microbatches)
    return {
        "samples": [plain(s) for s in samples],
        "metrics": metrics,
        "train": {k: train[k] for k in ("rewards", "raw_reward", "loss_masks", "rollout_ids", "rollout_mask_sums")},
        "split": [sorted(int(i) for i in partition) for partition in partitions],
        "buffered": {s.index: s.status.value for group in manager.data_source.buffer for s in group},
    }


def write_trained(manager: Any, rollout_id: int, train: dict[str, Any], partitions: Any, microbatches: Any) -> None:
    """The file of slime's trainer, by slime's own code, of ranks whose logprobs are the sampler's and 0.125 less."""
    import torch
    from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training
    from slime.observability.train_data_utils import _build_dump_payload

    shards = []
    for rank, partition in enumerate(partitions):
        mine = [int(i) for i in partition]
        data: dict[str, Any] = {"partition": mine, "num_microbatches": microbatches}
        data |= {key: [train[key][i] for i in mine] for key in ("tokens", "response_lengths", "loss_masks", "rewards")}
        tensorize_rollout_data_for_training(data)
        data["log_probs"] = [torch.tensor(train["rollout_log_probs"][i]) - 0.125 for i in mine]
        data["advantages"] = [torch.full((train["response_lengths"][i],), train["rewards"][i]) for i in mine]
        shards.append({"rank": rank, "data_parallel_rank": rank, "rollout_data": data})
    path = manager.args.save_debug_train_data.format(rollout_id=rollout_id)
    torch.save(_build_dump_payload(shards, rollout_id=rollout_id, writer_rank=0), path)


def from_buffer(manager: Any) -> dict[str, Any]:
    """A step that asks for no more groups than lie in the buffer."""
    manager.args.over_sampling_batch_size = manager.args.rollout_batch_size
    return step(manager, 1)


def evaluate(manager: Any, rollout_id: int) -> dict[str, Any]:
    from slime.observability.rollout_metrics import log_eval_rollout_data
    from slime.rollout.base_types import call_rollout_fn

    result = call_rollout_fn(
        manager.eval_generate_rollout, manager.args, rollout_id, manager.data_source, evaluation=True
    )
    rewards = {name: list(data["rewards"]) for name, data in result.data.items()}
    samples = {name: [plain(s) for s in data["samples"]] for name, data in result.data.items()}
    logged = log_eval_rollout_data(rollout_id, manager.args, result.data, result.metrics)
    return {"rewards": rewards, "samples": samples, "logged": {k: float(v) for k, v in logged.items()}}


def fully_async(manager: Any, place: dict[str, Any]) -> dict[str, Any]:
    """Rollouts that run on while the engine aborts everything, as a weight update under them does."""
    from slime.rollout import fully_async_rollout
    from slime.utils.misc import load_function

    manager.args.rollout_function_path = "agentcore_rl_toolkit.backends.slime.rollout.generate_rollout_fully_async"
    manager.generate_rollout = load_function(manager.args.rollout_function_path)
    before = aborted(place)
    cut = threading.Thread(target=abort_when_busy, args=(place,))
    cut.start()
    made = step(manager, 2)
    cut.join()
    worker = fully_async_rollout._global_worker
    fully_async_rollout._stop_global_worker()
    worker.worker_thread.join(90)  # what it still runs must not take the next step's episodes
    return {**made, "cut": aborted(place) - before}


def forked(manager: Any) -> dict[str, Any]:
    """A step in which some recorded episodes fork, some do not and some failed."""
    from slime.utils.misc import load_function

    sys.path.append(str(Path(__file__).parents[1]))
    from recorded import Replay, recorded_episodes

    from agentcore_rl_toolkit.backends.service import RolloutService
    from agentcore_rl_toolkit.backends.slime import generate as ours
    from agentcore_rl_toolkit.backends.slime.settings import SlimeSettings

    manager.args.rollout_function_path = "agentcore_rl_toolkit.backends.slime.rollout.generate_rollout"
    manager.generate_rollout = load_function(manager.args.rollout_function_path)
    by_kind: dict[str, list[Any]] = {}
    for episode in recorded_episodes(320):
        by_kind.setdefault(episode.kind, []).append(episode)
    kinds = ("multi_turn", "rewritten", "lost", "sub_agent")
    replay = Replay([by_kind[kind][i] for i in range(4) for kind in kinds], by_input=False)
    ours.use(RolloutService(SlimeSettings.from_args(manager.args), replay.client, replay.gateway))
    made = step(manager, 3)
    ours.rollouts(manager.args).close()
    return made


def abort_when_busy(place: dict[str, Any]) -> None:
    while requests.get(f"{place['engine']}/v1/loads", timeout=30).json()["loads"][0]["num_reqs"] < 2:
        time.sleep(0.01)
    post(place, "/abort_request", {"abort_all": True})


def aborted(place: dict[str, Any]) -> int:
    return int(requests.get(f"{place['engine']}/server_info", timeout=30).json().get("aborted_calls", 0))


if __name__ == "__main__":
    main()

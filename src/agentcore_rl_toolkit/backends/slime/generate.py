"""slime's `--custom-generate-function-path`: one sample, rolled out by a remote agent.

slime keeps its scheduling, groups, filters, evaluation and aborts; this function fills one sample. The first call in
a process opens the clients and, unless `gateway_url` names a running one, starts a model gateway in front of slime's
SGLang router. That gateway is a child of this process and ends with it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ..collection.groups import CollectedRollout, trained_temperature
from ..collection.recording import Recording
from ..service import RolloutService
from .convert import NOTE, joined, to_slime
from .settings import SlimeSettings

ABORT_LOOK_S = 0.5  # pause between checks whether slime aborts the step

# SGLang's names of sampling parameters -> OpenAI's. OpenAI's clients do not have the others.
_PARAMETERS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids")},
    **{"max_new_tokens": "max_tokens", "sampling_seed": "seed"},
}


_lock = threading.Lock()
_opened: RolloutService | None = None


def rollouts(args: Any) -> RolloutService:
    """Return this process's rollouts. The module keeps them: slime loads `generate` by name and has no place for state."""
    global _opened
    with _lock:
        if _opened is None:
            trained_temperature({"temperature": getattr(args, "rollout_temperature", 1.0)})
            engine = "sglang-experts" if getattr(args, "use_rollout_routing_replay", False) else "sglang"
            _opened = RolloutService.open(SlimeSettings.from_args(args), lambda: [router_url(args)], engine=engine)
        return _opened


def use(made: RolloutService | None) -> None:
    """Replace this process's rollouts: another gateway or client, or a replay. None resets them."""
    global _opened
    with _lock:
        _opened = made


def recording_of_process() -> Recording | None:
    return _opened.recording if _opened is not None else None


def begins(step: int) -> None:
    """Begin with the first step that this process hands over: delete the data that it repeats from the run's folder."""
    if _opened is not None:
        _opened.begins(step, evaluations_from=step)


def router_url(args: Any) -> str:
    """Return the URL of slime's SGLang router. Raises: ConfigError before slime has started it."""
    ip, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    if not ip or not port:
        raise ConfigError("slime has no SGLang router address yet (sglang_router_ip, sglang_router_port)")
    host = f"[{ip}]" if ":" in str(ip) and not str(ip).startswith("[") else ip
    return f"http://{host}:{port}"


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Fill `sample`, or return several samples for a forked episode: the function that slime calls.

    Never raises for a failed rollout: it returns a removed sample with the reason in its metadata. When slime aborts
    the step, the rollout is stopped and its sample comes back ABORTED and empty, to be run again.
    """
    payload = payload_of(sample)
    running = await asyncio.to_thread(rollouts, args)
    phase = "eval" if evaluation else "train"  # the step is known when slime takes the sample: `rollout.note_step`
    whole = running.settings.judging.judge is not None and not evaluation  # a judge reads whole groups
    group = {"group": ("group", sample.group_index), "n": args.n_samples_per_prompt} if whole else {}
    task = asyncio.ensure_future(running.roll(payload, openai_params(sampling_params), phase=phase, **group))
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=ABORT_LOOK_S)
            if not task.done() and not evaluation and _aborted(args):
                sample.status = type(sample).Status.ABORTED
                return sample
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    rollout = task.result()
    fully_async = "fully_async" in str(getattr(args, "rollout_function_path", ""))
    if cut_off(rollout) and fully_async and not evaluation:
        sample.status = type(sample).Status.ABORTED  # slime runs it again with the new weights
        return sample
    return joined(to_slime(rollout, sample, args=args, filler_id=int(getattr(args, "pad_token_id", None) or 0)))


def cut_off(rollout: CollectedRollout) -> bool:
    """Return True if the rollout is lost since SGLang aborted a call, as it does when slime updates weights under rollouts."""
    broken = () if rollout.usable or rollout.capture is None else rollout.capture.errors
    return any(error["status"] == "partial" for error in broken)


def payload_of(sample: Any) -> dict[str, Any]:
    """Return the agent's payload: the row's metadata, and its prompt if the metadata have none.

    An empty prompt is not added. It stands for a row without one, which slime cannot read.
    """
    metadata = {k: v for k, v in (sample.metadata or {}).items() if k != NOTE}
    return {"prompt": sample.prompt, **metadata} if sample.prompt else metadata


def openai_params(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert SGLang's sampling parameters to the names of OpenAI clients. Leave out absent and neutral ones."""
    found = {_PARAMETERS[k]: v for k, v in sampling_params.items() if k in _PARAMETERS and v is not None}
    return {k: v for k, v in found.items() if not (k == "top_k" and v == -1)}


def _aborted(args: Any) -> bool:
    """Return True while slime aborts the current step. slime keeps this in a singleton of each process."""
    module = sys.modules.get("slime.rollout.sglang_rollout")
    return bool(module is not None and module.GenerateState(args).aborted)

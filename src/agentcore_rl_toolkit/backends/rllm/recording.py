"""Writes rLLM's rollouts into a run's folder, for `agentcore-rl view`.

rLLM has no hook for rollouts, so this wraps three parts in the process of its trainer: the engine (each rollout as it ends), the
runtime (our client's facts of it), and the tracking (metrics, and the trained advantages). It also ends a run whose weights
did not arrive, by rLLM's log of a step. For verl that process is a Ray actor: a `Recorder` is among the arguments that rLLM
passes to its trainer, and attaches itself when it is unpickled there.

Names as of rLLM git 9beb6e0.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ...contract import Outcome
from ...errors import RolloutLostError, RolloutTimeoutError, WeightsError
from ...trajectory import Turn
from ...weights.arrival import MAX_MEAN_GAP
from ...weights.publishing import PAGE
from ..collection.groups import CollectedRollout, GroupRequest
from ..collection.judge import end_of_record, ended_by, judge
from ..collection.recording import FILTERED, Recording, open_recording, step_numbers
from ..collection.settings import CollectConfig

log = logging.getLogger(__name__)

# rLLM's log of the difference between sampled and the trainer's logprobs, in nats per token. Tinker: the mean absolute
# difference. verl: the mean difference, which estimates the KL divergence for tokens of the engine, before the update and in it.
# If verl uses the sampled logprobs as its own, the first is 0.
GAPS = ("train/kl_sample_train_v1", "offpolicy/kl", "actor/ppo_kl")


@dataclass(frozen=True)
class Capture:
    """A rollout's session, as rLLM read it before deleting it."""

    turns: list[Turn]
    dialogue: list[dict[str, Any]]
    errors: list[dict[str, Any]] = field(default_factory=list)


@dataclass(eq=False)
class Recorder:
    """Writes the rollouts of this process's rLLM trainer. Only `check` ends the run.

    ``filtering`` is rLLM's section `rllm.compact_filtering`; ``max_mean_gap`` is the limit of the mean difference
    between sampled and the trainer's logprobs (nats), None without a limit.
    """

    folder: str
    config: Mapping[str, Any]
    tokenizer: str | None = None
    filtering: Mapping[str, Any] = field(default_factory=dict)
    asynchronous: bool = False
    max_mean_gap: float | None = MAX_MEAN_GAP

    def __post_init__(self) -> None:
        self._recording: Recording | None = None
        self._futures: dict[str, Any] = {}  # session -> its future, from the invoke to the rollout's end
        self._session_of: dict[str, str] = {}  # rLLM's trajectory -> session, until it is trained
        self._open: dict[str, None] = {}  # sessions whose advantage is not known yet
        self._lock = threading.Lock()  # rollouts end in threads

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return attach, tuple(getattr(self, f.name) for f in fields(self))

    def invoked(self, session_id: str, future: Any) -> None:
        self._futures[session_id] = future

    def ended(self, episode: Any, *, task_id: str, place: int, task: Any, step: int, validation: bool) -> None:
        session_id = str(episode.session_id)
        payload = getattr(task, "metadata", task)
        request = GroupRequest(input_id=task_id, payload=payload if isinstance(payload, Mapping) else {"task": payload})
        capture = capture_of(episode)
        rollout = judge(
            replace(_end(self._futures.pop(session_id, None), episode, session_id, task_id), index=place),
            captured=True,
            capture=capture if capture.turns else None,
            fetch_error=None,
            config=CollectConfig(),
            sampling_params={"temperature": None},  # rLLM's temperature, by which it divides its logits
        )
        if not validation and rollout.mask_reason is not None and capture.turns and not self._masked(episode):
            # Without its filter, rLLM trains a failure as reward 0.
            rollout = replace(rollout, mask_reason=None, reward=_reward(episode))
        with self._lock:
            recording = self._opened(step, validation)
            recording.at("eval" if validation else "train", step).add(rollout, request)
            if not validation and rollout.mask_reason is None:
                self._open[session_id] = None
                self._session_of |= {trajectory.uid: session_id for trajectory in episode.trajectories}

    def logged(self, data: Mapping[str, Any], step: int, groups: Sequence[Any] | None) -> None:
        """Add rLLM's log of a step: its numbers, and the advantages of the trained rollouts."""
        with self._lock:
            if self._recording is None:
                return
            run = self._recording.run
            run.event("evaluated" if groups is None else "step", {"step": step, **step_numbers(data)})
            if groups is None:
                return
            for trajectory in (t for group in groups for t in group.trajectories):
                session_id = self._session_of.pop(trajectory.uid, None)
                if session_id is not None and session_id in self._open:
                    del self._open[session_id]
                    run.annotate(session_id, step=step, advantage=advantage_of(trajectory))
            if not self.asynchronous:  # otherwise the others may still be in rLLM's buffer
                for session_id in self._open:
                    run.annotate(session_id, mask_reason=FILTERED)
                self._open.clear()
                self._session_of.clear()

    def check(self, data: Mapping[str, Any], step: int) -> None:
        """Check by rLLM's log of a step that it was sampled from the trainer's weights.

        Asynchronous modes are not checked: the trainer has learned since their rollouts began.
        Raises: WeightsError, which ends the run.
        """
        limit = self.max_mean_gap
        if limit is None or self.asynchronous:
            return
        for name in GAPS:
            if name in data and not abs(float(data[name])) <= limit:
                raise WeightsError(
                    f"the weights did not arrive: {name} of step {step} is {float(data[name]):.2g} (at most {limit:g}), so the "
                    f"logprobs recorded by the engine and the trainer's own are of different weights. See {PAGE}"
                )

    def finished(self) -> None:
        if self._recording is not None:
            self._recording.finished()

    def close(self) -> None:
        if self._recording is not None:
            self._recording.run.close()
            self._recording = None

    def _opened(self, step: int, validation: bool) -> Recording:
        """Prepare to write these steps again, because training restarts or continues from a checkpoint."""
        if self._recording is None:
            self._recording = open_recording(Path(self.folder), self.config, tokenizer=self.tokenizer)
            first = step + 1 if validation and step else step
            self._recording.forget(from_step=first, evaluations_from=step if step > 1 else 0)
        return self._recording

    def _masked(self, episode: Any) -> bool:
        from rllm.trainer.algorithms.config import CompactFilteringConfig

        return bool(CompactFilteringConfig(**self.filtering).should_mask(episode.termination_reason))


_attached: Recorder | None = None


def attach(*made_of: Any, **more: Any) -> Recorder:
    """Return the recorder of this process. The first call makes it and connects it to rLLM's classes."""
    global _attached
    if _attached is not None:
        return _attached
    from rllm.engine.remote_agent_flow_engine import RemoteAgentFlowEngine
    from rllm.engine.remote_runtime.agentcore_runtime import AgentCoreRuntime
    from rllm.trainer.unified_trainer import UnifiedTrainer
    from rllm.utils.tracking import Tracking

    recorder = _attached = Recorder(*made_of, **more)

    async def rolled(roll: Any, engine: Any, task: Any, task_id: str, rollout_idx: int, *rest: Any, **more: Any) -> Any:
        found = await roll(engine, task, task_id, rollout_idx, *rest, **more)
        validation = bool(more.get("is_validation", False)) or engine.current_mode != "train"
        where = {"task_id": str(task_id), "place": rollout_idx, "task": task, "step": engine.current_step}
        await asyncio.to_thread(_safely, recorder.ended, found[3], **where, validation=validation)
        return found

    def logged(log_step: Any, tracking: Any, data: Any, step: Any, *rest: Any, **more: Any) -> Any:
        _safely(recorder.logged, data, step, more.get("trajectory_groups"))
        found = log_step(tracking, data, step, *rest, **more)
        recorder.check(data, step)
        return found

    def initialized(initialize: Any, runtime: Any) -> None:
        initialize(runtime)
        wrap(runtime._client, "invoke_async", invoked)

    async def invoked(invoke: Any, **given: Any) -> Any:
        future = await invoke(**given)
        recorder.invoked(str(given.get("session_id", future.session_id)), future)
        return future

    def fitted(fit: Any, trainer: Any) -> None:
        fit(trainer)
        recorder.finished()

    def shut(shutdown: Any, trainer: Any) -> None:
        try:
            shutdown(trainer)
        finally:
            recorder.close()

    wrap(RemoteAgentFlowEngine, "process_task_with_retry", rolled)
    wrap(Tracking, "log", logged)
    wrap(AgentCoreRuntime, "initialize", initialized)
    wrap(UnifiedTrainer, "fit", fitted)
    wrap(UnifiedTrainer, "shutdown", shut)
    return recorder


def wrap(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace ``owner.name`` with ``call``, whose first argument is the original."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def called(*given: Any, **more: Any) -> Any:
        return call(original, *given, **more)

    setattr(owner, name, called)


def _safely(call: Callable[..., None], *given: Any, **more: Any) -> None:
    try:
        call(*given, **more)
    except Exception:  # training continues without its record
        log.exception("a rollout or a step of rLLM was not kept")


def _end(future: Any, episode: Any, session_id: str, input_id: str) -> CollectedRollout:
    """Return how the rollout ended, according to this client, or to rLLM if the invoke itself failed."""
    ids = {"session_id": session_id, "input_id": input_id}
    reported = (episode.metadata or {}).get("error") or {}
    lost = RolloutLostError(str(reported.get("error_message") or "it ended without a record"), **ids)
    if future is None:
        return replace(ended_by(lost), ended_s=time.time())
    if future.record is not None:
        end = end_of_record(future.record, **ids, index=0)
    elif future.outcome in (None, Outcome.TIMEOUT):  # rLLM no longer waits for it
        end = ended_by(RolloutTimeoutError(str(lost), stage=future.stage.value, **ids), stage=future.stage)
    else:
        end = replace(ended_by(lost, stage=future.stage), outcome=future.outcome)
    facts = {"attempt": future.attempt, "elapsed_s": future.elapsed(), "stages": dict(future.stages)}
    return replace(end, ended_s=time.time(), **facts)


def capture_of(episode: Any) -> Capture:
    turns: list[Turn] = []
    dialogue: list[dict[str, Any]] = []
    for step in (step for trajectory in episode.trajectories for step in trajectory.steps):
        ids, logprobs = list(step.response_ids), list(step.logprobs)
        version = step.weight_version
        turns.append(
            Turn(
                turn_id=str(step.id),
                index=len(turns),
                prompt_ids=list(step.prompt_ids),
                completion_ids=ids,
                logprobs=logprobs if len(logprobs) == len(ids) else [None] * len(ids),
                # rLLM trains all of its steps, so none counts as cut off.
                finish_reason=getattr(step.model_output, "finish_reason", None) or "stop",
                weight_version_first=version,
                weight_version_last=version,
            )
        )
        messages = [dict(message) for message in step.chat_completions]
        asked, shown = _without_answers(messages), _without_answers(dialogue)
        dialogue = messages if asked[: len(shown)] == shown else [*dialogue, *messages]
    return Capture(turns, dialogue)


def _without_answers(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [message for message in messages if message.get("role") != "assistant"]


def _reward(episode: Any) -> float | None:
    return next((float(t.reward) for t in episode.trajectories if t.reward is not None), None)


def advantage_of(trajectory: Any) -> float | None:
    """Return the advantage of a rollout, or None if its steps or tokens have different ones."""
    found: set[float] = set()
    for step in trajectory.steps:
        given = step.advantage
        found |= set(given) if isinstance(given, list) else {given}
    return float(next(iter(found))) if len(found) == 1 and None not in found else None

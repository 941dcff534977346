"""slime's ``--rollout-function-path``: slime's own rollout functions, whose groups come back with forks flattened.

slime 0.3.1 takes several samples per rollout only when every rollout of a step gives several: it decides by the
first element of a step. Agents fork sometimes, so a step has both. This module flattens each group before slime reads
it. Samples of one rollout share their `rollout_id`, by which slime averages.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from ...client.evaluation import mean_metrics
from ...contract import Outcome
from ...weights.arrival import MAX_MEAN_GAP
from ..collection.recording import Recording, step_numbers
from ..collection.sessions import Places
from . import trained
from .convert import METRICS, NOTE, flat
from .generate import begins, recording_of_process

log = logging.getLogger(__name__)

_newest = -1  # the newest weight version that sampled a rollout of this process


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    from slime.rollout.sglang_rollout import generate_rollout as slimes

    began_s = time.monotonic()
    output = slimes(args, rollout_id, data_source, evaluation=evaluation)
    return _finished(output, args, rollout_id, time.monotonic() - began_s)


def generate_rollout_fully_async(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Take a step from rollouts that continue across steps (``train_async.py``). Evaluate in slime's default way."""
    _share_places(args)
    if evaluation:
        return generate_rollout(args, rollout_id, data_source, evaluation=True)
    from slime.rollout.base_types import RolloutFnTrainOutput
    from slime.rollout.fully_async_rollout import generate_rollout_fully_async as slimes

    began_s = time.monotonic()
    output = RolloutFnTrainOutput(samples=slimes(args, rollout_id, data_source))
    return _finished(output, args, rollout_id, time.monotonic() - began_s)


def _share_places(args: Any) -> None:
    """Replace the semaphore of slime 0.3.1, which has one per process.

    Fully asynchronous rollouts and a concurrent evaluation run on different event loops. The second loop that
    waits for the semaphore would fail.
    """
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.http_utils import get_rollout_num_engines

    state = GenerateState(args)
    if not isinstance(state.semaphore, Places):
        state.semaphore = Places(args.sglang_server_concurrency * get_rollout_num_engines(args))


def _finished(output: Any, args: Any, step: int, took_s: float) -> Any:
    """Flatten training groups, mask stale rollouts, leave masked ones out of evaluations, and count outcomes.

    slime logs the counts as metrics of the step or evaluation. The run's folder, if there is one, keeps all rollouts.
    """
    recording = recording_of_process()
    if recording is not None:
        begins(step)
    found: dict[str, float] = {}
    if hasattr(output, "samples"):
        event = "step"
        output.samples = [list(flat(group)) for group in output.samples]
        samples = [sample for group in output.samples for sample in group]
        mask_stale(samples, getattr(args, "max_staleness", None))
        note_step(recording, samples, step)
        if recording is not None:  # the trainer's numbers for the last steps, and this step's samples
            trained.take(recording, getattr(args, "max_mean_logprob_gap", MAX_MEAN_GAP))
            trained.expect(args, recording, samples, step)
        found = outcome_metrics(samples)
    else:
        event = "evaluated"
        for name in list(output.data):
            samples = list(output.data[name]["samples"])
            found |= {f"eval/{name}/{k}": v for k, v in outcome_metrics(samples).items()}
            note_step(recording, samples, step)
            leave_masked_out(name, output.data, args)
    if recording is not None:
        facts = step_numbers({**(output.metrics or {}), **found, "rollout_s": took_s})
        recording.run.event(event, {"step": step, **facts})
    output.metrics = {**(output.metrics or {}), **{f"{METRICS}/{k}": v for k, v in found.items()}}
    return output


def note_step(recording: Recording | None, samples: Iterable[Any], step: int) -> None:
    """Write into the run's folder the step of these samples, and the reason if one is masked."""
    for note in [(sample.metadata or {}).get(NOTE) for sample in samples]:
        if recording is not None and note:
            recording.run.annotate(note["session_id"], step=step, mask_reason=note["mask_reason"])


def mask_stale(samples: list[Any], max_staleness: int | None) -> None:
    """Mask rollouts whose oldest token lies more than `max_staleness` weight versions behind the newest one seen.

    The check is done when a step is handed over, because rollouts may wait in slime's buffer. The newest version that sampled
    anything is the trainer's own or, when the engines have not sampled since the last update, one less; so a rollout is
    never masked too early. All samples of a forked rollout are masked together. A rollout of unknown age is masked.
    """
    global _newest
    if max_staleness is None:
        return
    live = [s for s in samples if not s.remove_sample]
    _newest = max([_newest, *(int(version) for s in live for version in s.weight_versions)])
    reasons: dict[str, str] = {}
    for sample in live:
        oldest = min(map(int, sample.weight_versions), default=None)
        if oldest is None or oldest < _newest - max_staleness:
            reasons[sample.metadata[NOTE]["session_id"]] = "unknown_version" if oldest is None else "stale"
    for sample in live:
        reason = reasons.get(sample.metadata[NOTE]["session_id"])
        if reason is not None:
            sample.remove_sample = True
            sample.loss_mask = [0] * sample.response_length
            sample.metadata[NOTE]["mask_reason"] = reason


def leave_masked_out(name: str, data: dict[str, dict[str, Any]], args: Any) -> None:
    """Leave in an evaluation set one row per usable rollout before slime averages it.

    Masked rollouts are removed, and a forked one keeps its first row. slime's `log_passrate` needs
    `n_samples_per_eval_prompt` rows of each prompt; with it, all rows of a prompt with a masked rollout are removed. An
    empty set has no mean: it is removed with a warning, and not reported as 0.
    """
    samples = list(data[name]["samples"])
    kept = _kept(samples, args.n_samples_per_eval_prompt if getattr(args, "log_passrate", False) else 1)
    if samples and not kept:
        log.warning("evaluation %s: none of %d rollouts was usable", name, len(samples))
        del data[name]
    elif len(kept) < len(samples):
        for key, values in data[name].items():
            if isinstance(values, list) and len(values) == len(samples):
                data[name][key] = [values[i] for i in kept]


def _kept(samples: list[Any], group_size: int) -> list[int]:
    """Return positions of each usable rollout's first sample; only those of whole groups if groups are larger than 1."""
    first: dict[Any, int] = {}
    for i, sample in enumerate(samples):
        if not sample.remove_sample:
            first.setdefault(sample.index if sample.index is not None else ("position", i), i)
    if group_size == 1:
        return list(first.values())
    groups: dict[int, list[int]] = {}
    for index, i in first.items():
        groups.setdefault(index // group_size, []).append(i)
    return [i for members in groups.values() if len(members) == group_size for i in members]


def outcome_metrics(samples: Iterable[Any]) -> dict[str, float]:
    """Count the outcomes of samples that `convert.to_slime` made, and average the metrics of those that are trained.

    Each rollout counts once. ``reward_all`` is the mean over all rollouts, failures of agent and policy as 0, those of
    the infrastructure left out (``scored`` is their number). ``reward_ok`` is the mean over the rollouts that ended `ok`.
    A mean of nothing is absent.
    """
    by_rollout = {note["session_id"]: (s, note) for s in samples if (note := (s.metadata or {}).get(NOTE))}
    notes = [note for _, note in by_rollout.values()]
    trained_on = [note for sample, note in by_rollout.values() if not sample.remove_sample]
    labels = {"outcome": "outcome", "cause": "cause", "failure": "policy_failure"}
    counts = Counter(f"{label}/{n[key]}" for n in notes for key, label in labels.items() if n[key] is not None)
    scores = {
        "reward_all": [n["score"] for n in notes if n["score"] is not None],
        "reward_ok": [n["score"] for n in notes if n["score"] is not None and n["outcome"] == Outcome.OK],
    }
    counts |= {"rollouts": len(notes), "masked": len(notes) - len(trained_on), "scored": len(scores["reward_all"])}
    counts |= {"forked": sum(n.get("branches", 1) > 1 for n in notes)}
    metrics = mean_metrics(n["metrics"] for n in trained_on)
    return {
        **{name: float(count) for name, count in counts.items()},
        **{name: fmean(values) for name, values in scores.items() if values},
        **{f"metric/{name}": value for name, value in metrics.items()},
    }

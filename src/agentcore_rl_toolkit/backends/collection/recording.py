"""Writes collected rollouts into a run's folder: the one recorder under every trainer.

A collection with a `Recording` writes each rollout as it is judged. Trainers add later numbers (the advantage, their own
logprobs) if they have them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...client.data import encode_payload
from ...errors import AgentCoreRLError
from ...runs import Rollout, RunWriter, TokenSequence, TokenTexts, write_config
from ...runs.folder import FAILED, METRICS, SUMMARY, read_metrics
from ...runs.in_flight import in_flight
from ...runs.spans import SpanSender
from ...trajectory import SIDE_CALLS
from .groups import CollectedRollout, Group, GroupRequest
from .samples import Sample

LOG_CHARACTERS = 20_000
FILTERED = "filtered"  # mask reason of rollouts that a trainer left out of its batch


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The part of a run to which rollouts belong.

    ``session_log`` returns the output of a session. It is called for failed rollouts, on the writer's thread.
    """

    run: RunWriter
    phase: str = "train"
    step: int | None = None
    session_log: Callable[[str], str] | None = None

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *exc: object) -> None:
        self.run.close()

    def watched(self, client: Any, gateway: Any) -> contextlib.AbstractContextManager[None]:
        """Keep `in_flight.json` of the run while the block runs, for `agentcore-rl runs show --in-flight`."""
        if not hasattr(client, "flights"):
            return contextlib.nullcontext()  # a client of the caller's own class
        sessions = functools.partial(gateway.sessions, running=True) if hasattr(gateway, "sessions") else None
        return in_flight(self.run.folder, client.flights, sessions, runtime_url=getattr(client, "endpoint_url", None))

    def at(self, phase: str, step: int | None = None) -> Recording:
        return replace(self, phase=phase, step=step)

    def add(self, rollout: CollectedRollout, request: GroupRequest, weight_version: int | None = None) -> None:
        """Write a rollout. Returns at once."""
        ended_s = rollout.ended_s if rollout.ended_s is not None else time.time()

        def make() -> Rollout:
            made = as_row(rollout, request, phase=self.phase, step=self.step, weight_version=weight_version)
            made.ended_s = ended_s
            if self.session_log is not None and rollout.error is not None:
                try:
                    made.log = self.session_log(rollout.session_id)[-LOG_CHARACTERS:] or None
                except (AgentCoreRLError, OSError):
                    made.log = None  # the runtime keeps no logs, or has ended
            return made

        self.run.rollout(make)

    def resumed(self, steps_done: int, steps: int) -> None:
        """Delete what a resumed run is going to repeat: the steps from here on, and the evaluations after them."""
        again = ("after",) if steps_done else ("before", "after")
        self.forget(from_step=steps_done, phases=again, evaluations_from=steps_done and min(steps_done + 1, steps))

    def forget(self, *, from_step: int, evaluations_from: int, phases: Sequence[str] = ()) -> None:
        """Delete rollouts (`RunWriter.forget`) and the events of the same steps and evaluations.

        An evaluation "after" the last step of an ended run that is continued stays, under the name of its step.
        """
        self.run.forget(from_step=from_step, phases=phases, evaluations_from=evaluations_from)
        folder, kept = self.run.folder, []
        for event in read_metrics(folder):
            first, name = (evaluations_from, "version") if event["event"] == "evaluated" else (from_step, "step")
            at = event.get(name, event.get("step"))
            if event["event"] != FAILED and (at is None or at < first):
                kept.append({**event, "when": f"step-{at}"} if event.get("when") == "after" else event)
        written = folder / f"{METRICS}.partial"
        written.write_text("".join(json.dumps(event) + "\n" for event in kept))
        written.replace(folder / METRICS)  # a full disk or a kill leaves the old file
        (folder / SUMMARY).unlink(missing_ok=True)

    def finished(self, **facts: Any) -> None:
        """Write `summary.json`. A run without it has stopped."""
        (self.run.folder / SUMMARY).write_text(json.dumps(facts) + "\n")

    def masked(self, groups: Sequence[Group]) -> None:
        """Add that a rollout was left out as too long, which is decided after it was recorded."""
        for rollout in (r for group in groups for r in group.rollouts if r.mask_reason == "too_long"):
            self.run.annotate(rollout.session_id, mask_reason=rollout.mask_reason)

    def advantages(self, samples: Sequence[Sample], *, trained: Sequence[Sample] | None = None) -> None:
        """Add the advantage of each rollout, the mean over its trained tokens, and that of each token if they differ.

        ``trained`` are the samples whose tokens get a gradient, if the trainer leaves some out.
        """
        taken = {(sample.session_id, sample.sequence_index) for sample in (samples if trained is None else trained)}
        rollouts: dict[str, list[Sample]] = {}
        for sample in samples:
            rollouts.setdefault(sample.session_id, []).append(sample)
        for session_id, own in rollouts.items():
            differ = len({A for s in own for A, m in zip(s.advantages, s.response_mask, strict=True) if m}) > 1
            tokens = {
                s.sequence_index: of_sampled(s.advantages, s.response_mask, len(s.prompt_ids)) for s in own if differ
            }
            self.run.annotate(
                session_id,
                advantage=math.fsum(s.weight * s.advantage for s in own),
                gradient_tokens=sum(
                    A != 0 for s in own if (session_id, s.sequence_index) in taken for A in s.advantages
                ),
                sequences={index: {"advantages": each} for index, each in tokens.items()},
            )

    def trained(
        self,
        session_id: str,
        sequence: int,
        *,
        logprobs: Sequence[float | None] | None = None,
        entropies: Sequence[float | None] | None = None,
        updates: int | None = None,
    ) -> None:
        """Add the trainer's numbers for a sequence of a rollout, by its index in the trajectory.

        Shapes: (T,), one entry per token of the sequence. ``updates`` counts the optimizer steps between the sampler's
        weights and those that computed the numbers.
        """
        added = {"trainer_logprobs": logprobs, "entropies": entropies, "updates": updates}
        self.run.annotate(session_id, sequences={sequence: {k: v for k, v in added.items() if v is not None}})


def open_recording(
    folder: Path | str,
    config: Mapping[str, Any],
    *,
    tokenizer: Path | str | None = None,
    session_log: Callable[[str], str] | None = None,
) -> Recording:
    """Return a recording into a folder, which is created if necessary. Close its ``run`` at the end.

    ``config`` is kept in `config.json` unless one is there; ``tokenizer`` is a folder with `tokenizer.json`, for the texts of
    tokens. If the environment names an OpenTelemetry collector, each rollout is sent to it as spans.
    """
    texts = TokenTexts(tokenizer) if tokenizer is not None else None
    run = RunWriter(Path(folder), texts=texts, spans=SpanSender.from_env())
    write_config(Path(folder), config)
    return Recording(run=run, session_log=session_log)


# Fields with one name in a collected rollout and in a run.
_SAME = (
    "session_id",
    "attempt",
    "failure",
    "mask_reason",
    "reward",
    "score",
    "elapsed_s",
    "ended_s",
    "traceback",
    "record",
    "stages",
)


def input_key(payload: Mapping[str, Any]) -> str:
    """Return a digest of the payload, which is the same in every step and run."""
    return hashlib.sha256(encode_payload(payload).encode()).hexdigest()[:16]


def as_row(
    rollout: CollectedRollout,
    request: GroupRequest,
    *,
    phase: str = "train",
    step: int | None = None,
    weight_version: int | None = None,
) -> Rollout:
    capture, detail = rollout.capture, rollout.reward_detail
    oldest = rollout.weight_version_min
    parts: dict[str, Any] = {}
    if detail is not None and detail.per_turn is not None:
        parts["per_turn"] = detail.per_turn
    if rollout.judge_score is not None:
        parts["judge"] = rollout.judge_score._asdict()
    return Rollout(
        **{name: getattr(rollout, name) for name in _SAME},
        phase=phase,
        step=step,
        group=request.group or request.input_id,
        input_key=input_key(request.payload),
        place=rollout.index,
        outcome=rollout.outcome.value,
        cause=rollout.cause.value if rollout.cause is not None else None,
        stage=rollout.stage.value if rollout.stage is not None else None,
        staleness=None if weight_version is None or oldest is None else weight_version - oldest,
        weight_min=oldest,
        weight_max=rollout.weight_version_max,
        error=rollout.reason,
        payload=request.payload,
        metrics=detail.metrics if detail is not None else {},
        reward_parts=parts or None,
        **captured(capture, rollout.trajectory),
    )


def captured(capture: Any, trajectory: Any) -> dict[str, Any]:
    """Return the facts of a rollout's model calls and tokens, or nothing without a gateway."""
    found: dict[str, Any] = {}
    if capture is not None:
        found["dialogue"] = capture.dialogue
        found["call_errors"] = capture.errors
        found["calls"] = [
            {
                "turn_id": turn.turn_id,
                "started_s": turn.started_s,
                "first_token_s": turn.first_token_s,
                "finished_s": turn.finished_s,
                "prompt_tokens": len(turn.prompt_ids),
                "sampled_tokens": len(turn.completion_ids),
                "finish_reason": turn.finish_reason,
                "weight_first": turn.weight_version_first,
                "weight_last": turn.weight_version_last,
                "parse_status": turn.parse_status,
                "untrainable": turn.why_untrainable(),
                "delivered": turn.delivered,
            }
            for turn in capture.turns
        ]
    if trajectory is not None:
        found["fidelity"] = asdict(trajectory.report)
        found["sequences"] = [
            TokenSequence(
                ids=sequence.token_ids,
                mask=sequence.loss_mask,
                logprobs=sequence.logprobs,
                versions=sequence.weight_versions,
                prompt_length=sequence.prompt_length,
                turn_ids=sequence.turn_ids,
                context_turn_ids=sequence.context_turn_ids,
                branch_reason=sequence.branch_reason,
                side_call=None if sequence.side_call is None else SIDE_CALLS[sequence.side_call],
                finish_reason=sequence.finish_reason,
                weight=sequence.weight,
            )
            for sequence in trajectory.sequences
        ]
    return found


def of_sampled(values_R: Sequence[float], mask_R: Sequence[int], prompt_tokens: int) -> list[float | None]:
    """Align a trainer's numbers of a response with the whole sequence. They are None where the token was not sampled.

    Shapes: (R,), (R,) -> (prompt_tokens + R,).
    """
    return [*[None] * prompt_tokens, *(v if mine else None for v, mine in zip(values_R, mask_R, strict=True))]


def gaps_of(own_R: Sequence[float], recorded_R: Sequence[float | None], mask_R: Sequence[int]) -> list[float]:
    """Return the differences between a trainer's logprobs and the recorded ones, for each sampled token. Shapes: all (R,)."""
    each = zip(own_R, recorded_R, mask_R, strict=True)
    return [abs(own - recorded) for own, recorded, mine in each if mine and recorded is not None]


# Shared names of a step's numbers, and the trainers' names for them. A divergence is named after the policy with which the
# trained policy is compared: the engine's at sampling, that at the step's start, a frozen one, or a teacher.
STEP_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "loss": ("actor/pg_loss", "actor/loss", "train/loss", "loss"),
    "grad_norm": ("actor/grad_norm", "grad_norm"),
    "clip_fraction": ("actor/pg_clipfrac", "train/pg_clipfrac", "clip_ratio/region_mean", "clip_fraction"),
    "kl_sampler": ("rollout_corr/k3_kl", "kl_sampler"),
    "kl_old": ("actor/ppo_kl", "train/ppo_kl"),
    "kl_reference": ("actor/kl_loss", "train/kl_loss", "kl"),
    "kl_teacher": ("agentcore/kl_teacher", "kl_teacher"),
}


def step_numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a trainer's log of a step, also NaN, and `STEP_NUMBERS` under the names of all runs."""
    found = {str(name): float(value) for name, value in data.items() if isinstance(value, numbers.Real)}
    shared = {name: [found[n] for n in theirs if n in found] for name, theirs in STEP_NUMBERS.items()}
    found |= {name: values[0] for name, values in shared.items() if values}
    if "actor/pg_clipfrac" in found:  # verl counts the tokens of its dual clip separately
        found["clip_fraction"] += found.get("actor/pg_clipfrac_lower", 0.0)
    return found

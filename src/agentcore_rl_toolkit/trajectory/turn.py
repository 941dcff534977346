"""A model call of a session, as tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentcore_rl_toolkit.errors import CaptureError

ParseStatus = Literal["none", "parsed", "unparsed"]

# Finish reasons of calls whose tokens the agent did not get as a whole answer. None means the stream broke off.
UNFINISHED_REASONS = frozenset({None, "abort", "aborted", "cancelled", "error"})

# Sampling parameters that no trainer reproduces, and the values at which they change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **{"presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},)},
    **{"top_p": (1,), "top_k": (-1, 0), "min_p": (0,)},
}
CUTS = ("top_p", "top_k", "min_p")  # the last: the tokens that they leave keep their order and proportions

# Why a turn does not continue the sequence before it. A gateway that knows the messages may say so in
# `Turn.branch_reason`.
BRANCH_REASONS = (
    *("history_rewritten", "tools_changed", "options_changed", "sub_agent", "parallel_calls", "resampled"),
    *("retokenized", "template", "compaction"),
)

# How a later request has the answer of a turn, from the strongest: its history ends with it; the same, and a user's message
# follows a final answer; it is further back in the history; a text of another message quotes it; a text quotes what it called a
# tool with.
FLOWS = ("continued", "reviewed", "history", "quoted", "called")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A model call.

    A field is None if it is not known. ``index`` is the order in which the calls of the session *started*.

    - ``finish_reason``: the engine's own word. None, or one of `UNFINISHED_REASONS`, marks a call that broke off: its tokens are
      counted as sampled and never trained.
    - ``parse_status``: "unparsed" if the completion has text that looks like a tool call and does not parse.
    - ``answered`` False: the policy ended inside its reasoning, and the agent got a blank answer.
    - ``delivered`` False: as far as the gateway knows, the agent did not get the whole answer. The turn is trained only if a
      later one continues it.
    - ``parent_turn``, ``branch_reason`` (one of `BRANCH_REASONS`): the turn that this one continues, or why it continues none.
    - ``free_tokens``: the tokens at the completion's beginning that were sampled freely. A grammar held the others to a form, so
      they are not trained. None: all were.
    - ``tools``, ``tag``, ``system``, ``sampling``: the names of the offered tools, the agent's word for the role of the call, a
      digest of the leading system messages, and the sampling parameters that the call names.
    - ``feeds``: the ids of later turns whose prompts have this answer, each with one of `FLOWS`.
    - ``left_out``: the items, parts and fields of the agent's history that the model did not get as sent, counted by kind.
    - ``unsampled``: answers in the session's first prompt, which the session never sampled.
    - ``routed_experts``: the engine's array as raw bytes. ``reply_id``: the id of the reply in OpenAI's chat API.

    Shapes: ``prompt_ids`` (P,), ``completion_ids`` (C,), ``logprobs`` (C,), ``token_weight_versions`` (C,) or None.
    Units: unix seconds for ``*_s``.
    Raises: CaptureError when the lengths do not fit together.
    """

    turn_id: str
    index: int
    # Not printed: whatever prints a session (asyncio formats a task's result, too) would take seconds over its tokens.
    prompt_ids: Sequence[int] = field(repr=False)
    completion_ids: Sequence[int] = field(repr=False)
    logprobs: Sequence[float | None] = field(repr=False)
    finish_reason: str | None
    weight_version_first: int | None = None
    weight_version_last: int | None = None
    parse_status: ParseStatus = "none"
    routed_experts: bytes | None = field(default=None, repr=False)
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    trainable: bool = True
    untrainable_reason: str | None = None
    parent_turn: str | None = None
    branch_reason: str | None = None
    choice_index: int = 0
    token_weight_versions: Sequence[int | None] | None = field(default=None, repr=False)
    delivered: bool = True
    tools: tuple[str, ...] | None = None
    tag: str | None = None
    system: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    answered: bool = True
    reply_id: str | None = None
    feeds: Mapping[str, str] = field(default_factory=dict, repr=False)
    left_out: Mapping[str, int] = field(default_factory=dict)
    free_tokens: int | None = None
    unsampled: int = 0

    def __post_init__(self) -> None:
        sampled = len(self.completion_ids)
        if len(self.logprobs) != sampled:
            raise CaptureError(
                f"turn {self.turn_id}: {len(self.logprobs)} logprobs for {sampled} completion tokens; "
                "the engine must return one logprob per sampled token"
            )
        if self.token_weight_versions is not None and len(self.token_weight_versions) != sampled:
            raise CaptureError(
                f"turn {self.turn_id}: {len(self.token_weight_versions)} weight versions for {sampled} completion tokens"
            )
        if self.branch_reason is not None and self.branch_reason not in BRANCH_REASONS:
            raise CaptureError(
                f"turn {self.turn_id}: branch reason {self.branch_reason!r} is not one of {BRANCH_REASONS}"
            )

    @property
    def trained_tokens(self) -> int:
        """Return the tokens at the completion's beginning that may be trained."""
        sampled = len(self.completion_ids)
        return sampled if self.free_tokens is None else min(self.free_tokens, sampled)

    def why_untrainable(self) -> str | None:
        """Return the reason why no token of this turn may be trained on, or None when all of them may.

        One of: what the recorder said (``untrainable_reason``, or "marked"), "unfinished", "empty", "missing_prompt",
        "missing_logprobs", "bad_logprobs" (not a number, or infinite).
        """
        if not self.trainable:
            return self.untrainable_reason or "marked"
        if self.finish_reason in UNFINISHED_REASONS:
            return "unfinished"
        if not len(self.completion_ids):
            return "empty"
        if not len(self.prompt_ids):
            return "missing_prompt"
        if None in self.logprobs:
            return "missing_logprobs"
        # The sum of finite logprobs is finite: one C-speed pass instead of a check per token.
        if not math.isfinite(sum(self.logprobs)):  # type: ignore[arg-type]  # no None left
            return "bad_logprobs"
        return None

    def sampled_otherwise(self, temperature: float | None) -> str | None:
        """Return how the call was sampled if a trainer that only scales by ``temperature`` computes other logprobs, or None.

        ``temperature`` None: whatever the call had is the trainer's. Cuts come last.
        """
        asked = {"temperature": 1.0, **self.sampling}
        reproduced = _NEUTRAL if temperature is None else {"temperature": (temperature,), **_NEUTRAL}
        found = {name: asked[name] for name, same in reproduced.items() if asked.get(name, same[0]) not in same}
        return ", ".join(name if name == "logit_bias" else f"{name} {value:g}" for name, value in found.items()) or None

    def token_versions(self) -> list[int | None]:
        """Return the weight version of each completion token.

        An engine that says it per token is believed. Otherwise first and last are known: tokens between them get the
        first one, so that staleness is never understated. Shapes: -> (C,).
        """
        if self.token_weight_versions is not None:
            return list(self.token_weight_versions)
        count = len(self.completion_ids)
        first, last = self.weight_version_first, self.weight_version_last
        versions = [first if first is not None else last] * count
        if count and last is not None:
            versions[-1] = last
        return versions


def overlaps(a: Turn, b: Turn) -> bool:
    """Return True if both calls ran at the same time; False if that is not known."""
    if a.started_s is None or b.started_s is None or a.finished_s is None or b.finished_s is None:
        return False
    return a.started_s < b.finished_s and b.started_s < a.finished_s

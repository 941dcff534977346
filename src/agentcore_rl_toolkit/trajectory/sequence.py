"""The trajectory of a session: training sequences, and the report on how faithful they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentcore_rl_toolkit.contract import DEFAULT_TRAIN
from agentcore_rl_toolkit.errors import CaptureError


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSpan:
    """Expert routing of one turn: the engine's bytes, and where the turn's completion lies in the sequence.

    Engines report routing for the prompt of the turn too; positions [0, ``start``) of the sequence are that prompt.
    """

    turn_id: str
    start: int
    stop: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSequence:
    """A branch of a session, ready to train on. All per-token lists have length T.

    ``loss_mask`` is 1 where the token was sampled and is trained here; a token that several branches share is 1 in
    exactly one of them. ``logprobs`` and ``weight_versions`` are None where the mask is 0 (a version also where the
    engine gave none). ``prompt_length`` is the position of the first trained token. ``turn_ids`` are the turns
    trained here, ``context_turn_ids`` those that are trained in another branch and only re-read here. ``weight`` is
    this sequence's share of the session's trained tokens: weights of a session sum to 1, and a weighted sum of
    per-sequence means equals the mean over the whole session, however often it forked. ``side_call`` is why nothing of it
    is trained (a key of `SIDE_CALLS`); its mask and weight are 0, and ``turn_ids`` are its turns.
    """

    token_ids: list[int] = field(repr=False)
    loss_mask: list[int] = field(repr=False)
    logprobs: list[float | None] = field(repr=False)
    prompt_length: int
    turn_ids: list[str]
    weight_versions: list[int | None] = field(repr=False)
    weight: float = 1.0
    context_turn_ids: list[str] = field(default_factory=list)
    branch_reason: str | None = None
    finish_reason: str | None = None
    routed_experts: list[ExpertSpan] = field(default_factory=list, repr=False)
    side_call: str | None = None

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        if not len(self.loss_mask) == len(self.logprobs) == len(self.weight_versions) == length:
            raise CaptureError(
                f"a sequence of {length} tokens has {len(self.loss_mask)} mask entries, {len(self.logprobs)} logprobs and "
                f"{len(self.weight_versions)} weight versions"
            )

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that are trained."""
        return sum(self.loss_mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityReport:
    """The share of a session's sampled tokens that is trained, and the reasons for the rest.

    - ``turns``: distinct calls. ``duplicate_turns``: further records of the same calls.
    - ``branches``: turns that did not continue the sequence before them, by cause in ``branch_reasons``.
    - ``untrainable_turns``: by cause in ``untrainable_reasons``. ``mixed_version_turns``: sampled by several weight versions.
    - ``train``: the rule that picked what trains. ``side_calls``: the sampled tokens that it left out, by reason (`SIDE_CALLS`).
      ``sequences`` and ``sequence_tokens`` do not count these.
    - ``other_sampling``: tokens that were sampled otherwise than the trainer reproduces, by how. Those of another temperature, or
      with penalties or a logit bias, are not trained, and are no side calls. Those of a cut distribution (top_p, top_k, min_p)
      are trained.
    - ``held_tokens``: tokens of trained turns that a grammar held to a form. They are not trained.
    - ``history_difference``: the share of the prompts' tokens that a template left out of earlier turns, or wrote otherwise
      (`GatewayConfig.history` "template"). None: no prompt lost any.
    - ``unsampled_answers``: answers in the session's first prompt, which the session never sampled. They are examples that the
      agent writes, or the history of an earlier rollout that an agent kept in a global variable.
    - ``unanswered_turns``: ended inside the policy's reasoning. ``left_out``: turns whose model did not get the agent's whole
      history, by kind.

    Units: tokens.
    """

    turns: int = 0
    sequences: int = 0
    branches: int = 0
    branch_reasons: dict[str, int] = field(default_factory=dict)
    sampled_tokens: int = 0
    trained_tokens: int = 0
    sequence_tokens: int = 0
    unparsed_tool_calls: int = 0
    untrainable_turns: int = 0
    untrainable_reasons: dict[str, int] = field(default_factory=dict)
    duplicate_turns: int = 0
    mixed_version_turns: int = 0
    weight_version_min: int | None = None
    weight_version_max: int | None = None
    train: str = DEFAULT_TRAIN
    side_calls: dict[str, int] = field(default_factory=dict)
    other_sampling: dict[str, int] = field(default_factory=dict)
    unanswered_turns: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    held_tokens: int = 0
    unsampled_answers: int = 0
    history_difference: float | None = None

    @property
    def side_call_tokens(self) -> int:
        """The number of tokens of calls that do not train."""
        return sum(self.side_calls.values())

    @property
    def trained_token_share(self) -> float | None:
        """Trained / sampled tokens, side calls left out; None when nothing was sampled."""
        sampled = self.sampled_tokens - self.side_call_tokens
        return self.trained_tokens / sampled if sampled else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """All turns of a session as training sequences, in the order of their branches' first turns, and the fidelity report."""

    session_id: str
    sequences: list[TrainingSequence] = field(repr=False)
    report: FidelityReport

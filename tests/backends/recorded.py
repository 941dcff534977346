"""Episodes of every kind that trainers have to get right, made from a fixed seed: the shared table of cases of all
backends.

The kinds: one turn, many turns with tool results, a history that was rewritten (fork), a sub-agent in between (fork),
an answer cut at the length limit, weights that moved during the rollout, expert routing, a tool call that did not
parse, a policy that ran out of tokens (trained with the reward that its agent declares, unless the run masks such rollouts);
and those that must not be trained on: an agent that raised, one that the infrastructure failed, a policy's failure without
a reward, a lost session, a record without reward, a rollout without captured tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from agentcore_rl_toolkit.backends.collection.groups import GroupRequest
from agentcore_rl_toolkit.backends.replay import Episode
from agentcore_rl_toolkit.errors import RolloutLostError
from agentcore_rl_toolkit.trajectory import Turn

GOOD_KINDS = (
    *("single", "multi_turn", "rewritten", "sub_agent", "truncated", "mixed_versions", "moe", "unparsed"),
    "policy_failed",
)
BAD_KINDS = ("agent_error", "lost", "no_reward", "no_tokens", "infrastructure", "policy_unscored")
# Mixed, so that every group has some that are trained, also in runs that mask what the policy failed at.
KINDS = (*GOOD_KINDS[:5], *BAD_KINDS[:3], *GOOD_KINDS[5:], *BAD_KINDS[3:])

EXPERT_LAYERS, EXPERT_TOP_K = 2, 2


def recorded_episodes(
    n: int = 64, *, per_group: int = 8, seed: int = 0, vocabulary: int = 500, versions: tuple[int, int] = (3, 4)
) -> list[Episode]:
    """`n` episodes in groups of `per_group`, every kind in turn; equal arguments give equal episodes.

    Token ids lie in [10, vocabulary). Rewards are 0, 1 or a fraction, so that groups have a spread.
    """
    rng = random.Random(seed)
    made = []
    for i in range(n):
        kind = KINDS[i % len(KINDS)]
        made.append(_Recorder(rng, f"case-{i // per_group:02d}", kind, vocabulary, versions).episode())
    return made


def requests_for(episodes: Sequence[Episode]) -> list[GroupRequest]:
    """One group request per input id of the episodes, asking for all of them."""
    counts: dict[str, int] = {}
    for episode in episodes:
        counts[episode.input_id] = counts.get(episode.input_id, 0) + 1
    return [GroupRequest(input_id=i, payload={"prompt": f"task {i}"}, n=n, metadata=i) for i, n in counts.items()]


class _Recorder:
    """Writes one episode down turn by turn, the way a gateway would have captured it."""

    def __init__(
        self, rng: random.Random, input_id: str, kind: str, vocabulary: int, versions: tuple[int, int]
    ) -> None:
        self.rng, self.input_id, self.kind, self.vocabulary = rng, input_id, kind, vocabulary
        self.first, self.last = versions
        self.turns: list[Turn] = []

    def episode(self) -> Episode:
        good: dict[str, Callable[[], Any]] = {
            "single": lambda: self.talk(1),
            "multi_turn": lambda: self.talk(self.rng.randint(2, 5)),
            "rewritten": self.rewritten,
            "sub_agent": self.sub_agent,
            "truncated": lambda: self.talk(2, last_reason="length"),
            "mixed_versions": lambda: self.talk(3, moving=True),
            "moe": lambda: self.talk(2, experts=True),
            "unparsed": lambda: self.talk(2, parse_status="unparsed"),
        }
        reward: Any = self.rng.choice([0.0, 1.0, 0.25, [0.1, 0.5], {"reward": 1.0, "format": 0.5}])
        if self.kind in good:
            good[self.kind]()
            return self.done({"rewards": reward, "status_code": 200})
        if self.kind in ("policy_failed", "policy_unscored"):
            self.talk(3, last_reason="length")
            scored = {"rewards": self.rng.choice([0.0, -1.0])} if self.kind == "policy_failed" else {}
            return self.done({**self.raised("policy", failure="tokens"), **scored})
        if self.kind != "no_tokens":
            self.talk(2)
        if self.kind == "lost":
            return self.done(None, RolloutLostError("the session died without a record"))
        if self.kind == "infrastructure":
            return self.done({**self.raised("infrastructure"), "rewards": 1.0})
        if self.kind == "agent_error":  # as an agent of the published toolkit leaves it: without a word on the cause
            return self.done(
                {"status_code": 500, "stop_reason": "boom", "traceback": "Traceback: boom", "rewards": 1.0}
            )
        return self.done({"status_code": 200} if self.kind == "no_reward" else {"rewards": 1.0, "status_code": 200})

    def raised(self, cause: str, **facts: str) -> dict[str, Any]:
        """The record of an agent that raised."""
        block = {"outcome": "agent_error", "cause": cause, **facts}
        return {"status_code": 500, "stop_reason": "boom", "traceback": "Traceback: boom", "_agent": block}

    def done(self, record: dict[str, Any] | None, failure: BaseException | None = None) -> Episode:
        return Episode(input_id=self.input_id, turns=tuple(self.turns), record=record, failure=failure, kind=self.kind)

    def ids(self, low: int, high: int) -> list[int]:
        return [self.rng.randrange(10, self.vocabulary) for _ in range(self.rng.randint(low, high))]

    def talk(
        self,
        turns: int,
        *,
        prompt: list[int] | None = None,
        last_reason: str = "stop",
        moving: bool = False,
        experts: bool = False,
        parse_status: Any = "parsed",
    ) -> list[int]:
        """Append turns that each extend the one before by its answer and new context; returns everything said."""
        history = prompt if prompt is not None else self.ids(8, 16)
        for k in range(turns):
            completion = self.ids(2, 9)
            self.add(
                history,
                completion,
                finish_reason=last_reason if k == turns - 1 else "tool_calls",
                weight_version_last=self.last if moving and k else self.first,
                parse_status="none" if k == turns - 1 and parse_status == "parsed" else parse_status,
                routed_experts=self.experts(len(history) + len(completion)) if experts else None,
            )
            history = history + completion + self.ids(2, 6)
        return history

    def rewritten(self) -> None:
        """The agent compacts its history: the same system prompt, then other tokens. Then it goes back to its first answer."""
        head = self.ids(8, 12)
        self.talk(2, prompt=head)
        first = self.turns[0]
        self.talk(2, prompt=head[:6] + self.ids(5, 9))
        # Sampled tokens of the first branch are context of this one: they must be trained there and only there.
        self.talk(1, prompt=[*first.prompt_ids, *first.completion_ids, *self.ids(2, 6)])

    def sub_agent(self) -> None:
        """A sub-agent with a prompt of its own runs between two turns of the main one."""
        history = self.talk(1)
        self.talk(2)
        self.talk(1, prompt=history)

    def add(self, prompt: list[int], completion: list[int], **facts: Any) -> None:
        index = len(self.turns)
        self.turns.append(
            Turn(
                turn_id=f"turn-{index}",
                index=index,
                prompt_ids=list(prompt),
                completion_ids=completion,
                logprobs=[-self.rng.random() * 3 for _ in completion],
                weight_version_first=self.first,
                **facts,
            )
        )

    def experts(self, tokens: int) -> bytes:
        """int32 expert numbers, (tokens - 1, layers, top k) row by row, as SGLang returns them."""
        count = (tokens - 1) * EXPERT_LAYERS * EXPERT_TOP_K
        return b"".join(self.rng.randrange(8).to_bytes(4, "little") for _ in range(count))

"""Both means of a validation, which verl's own rows cannot give."""

from __future__ import annotations

from agentcore_rl_toolkit.backends.collection.collect import CollectedRollout, Group, GroupRequest
from agentcore_rl_toolkit.backends.verl.validation import Validation
from agentcore_rl_toolkit.contract import Cause, Outcome


def group(*ends: float | Cause) -> Group:
    rollouts = [
        CollectedRollout(
            session_id=f"s{i}",
            input_id="a",
            index=i,
            outcome=Outcome.AGENT_ERROR if isinstance(end, Cause) else Outcome.OK,
            cause=end if isinstance(end, Cause) else None,
            reward=None if isinstance(end, Cause) else end,
            mask_reason="outcome" if isinstance(end, Cause) else None,
        )
        for i, end in enumerate(ends)
    ]
    return Group(input_id="a", rollouts=rollouts, request=GroupRequest(input_id="a", payload={}, n=len(ends)))


def test_both_means_are_told_when_the_last_prompt_is_over() -> None:
    validation = Validation()
    validation.begin(3)
    assert validation.ended(group(1.0, Cause.POLICY)) is None
    assert validation.ended(None) is None
    assert validation.ended(group(1.0, Cause.INFRASTRUCTURE)) == (
        "reward 0.67 of 3 (1.00 of the 2 that ended ok), 1 not scored; failures: 1 infrastructure, 1 policy"
    )
    validation.begin(1)
    assert validation.ended(group(0.5)) == "reward 0.50 of 1"

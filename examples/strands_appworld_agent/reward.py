"""The reward of a world: AppWorld's own tests of the task."""

from appworld_http.world import Evaluation

from agentcore_rl_toolkit import RewardFunction


class AppWorldReward(RewardFunction):
    """Return 1.0 if every test passes, otherwise 0.0. This is AppWorld's task goal completion.

    With ``partial``, the reward is the share of passed tests among the tests that fail if nothing is done. If a test fails that
    would pass if nothing was done, the reward is 0.
    """

    def __init__(self, *, partial: bool = False) -> None:
        self._partial = partial

    def __call__(self, *, evaluation: Evaluation) -> float:
        if evaluation.success or not self._partial:
            return float(evaluation.success)
        if any(test.get("label") == "no_op_pass" for test in evaluation.failures):
            return 0.0  # the agent changed something that must not change
        done = sum(test.get("label") == "no_op_fail" for test in evaluation.passes)
        return done / max(1, done + len(evaluation.failures))

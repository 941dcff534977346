"""The names of a step's numbers, with their formulas: one list for `metrics.jsonl`, panel, view, trackers and docs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepMetric:
    """A number of a step, an evaluation, or both (``of``). ``watch`` is the meaning of an unusual value."""

    name: str
    formula: str
    watch: str = ""
    of: str = "step"


STEP_METRICS: dict[str, tuple[StepMetric, ...]] = {
    "Rewards": (
        StepMetric(
            "reward",
            "Mean over inputs of the mean reward of an input's rollouts. Failures of the agent and of the policy count as 0. "
            "Failures of the infrastructure do not count.",
            "It should rise. If it does not, look at the shares of groups below.",
            of="both",
        ),
        StepMetric("scored", "Number of rollouts in `reward`.", of="both"),
        StepMetric("reward_ok", "The same mean over the rollouts that ended `ok`.", of="both"),
        StepMetric("ok", "Number of rollouts in `reward_ok`.", of="both"),
        StepMetric(
            "reward_interval", "95 % confidence interval of `reward` over held-out inputs: low, high.", of="evaluated"
        ),
        StepMetric("reward_spread", "Standard deviation of the groups' mean rewards.", of="both"),
        StepMetric(
            "reward_spread_within",
            "Mean over groups of the standard deviation of the rewards in a group.",
            "0: no group teaches anything. Advantages are differences within groups.",
            of="both",
        ),
        StepMetric(
            "groups_all_solved",
            "Share of groups in which every scored rollout has a reward of 1 or more.",
            "Near 1: the data is too easy.",
            of="both",
        ),
        StepMetric(
            "groups_all_failed",
            "Share of groups in which every scored rollout has a reward of 0 or less.",
            "Near 1: the data is too hard, or the agent fails before it can succeed.",
            of="both",
        ),
        StepMetric(
            "groups_that_differ",
            "Number of groups with a rollout that has an advantage other than 0 and was trained.",
            "0: the step taught nothing.",
        ),
        StepMetric(
            "groups_replaced",
            "Number of groups without spread that were replaced since the last step (`replace_up_to`).",
            "Near its limit: filter the data (`runs export --rows`).",
        ),
        StepMetric(
            "reward_by_source",
            "`reward` for each value of the field `data_source` of the inputs, if they have it.",
            of="both",
        ),
        StepMetric("metrics", "Means of the numbers that the agent returned with its reward.", of="both"),
    ),
    "Rollouts": (
        StepMetric("groups", "Number of groups: of inputs, each with its rollouts.", of="both"),
        StepMetric("rollouts", "Number of rollouts.", of="both"),
        StepMetric(
            "usable",
            "Number of rollouts that can be trained: `ok` or failed by the policy, with a reward and sampled tokens, and fresh.",
            "Much less than `rollouts`: read `outcomes` and `causes`.",
            of="both",
        ),
        StepMetric("outcomes", "Number of rollouts by outcome.", of="both"),
        StepMetric("causes", "Number of failed rollouts by cause: infrastructure, agent, policy.", of="both"),
        StepMetric(
            "policy_failures",
            "Number of the policy's failures by kind, such as tokens, turns, context and calls that do not parse.",
            "Many `tokens` or `context`: answers are cut. Raise the limits, or penalize length.",
            of="both",
        ),
        StepMetric("turns_mean", "Model calls per usable rollout.", of="both"),
        StepMetric(
            "response_tokens_mean", "Sampled tokens per usable rollout.", "A fall can mean collapse.", of="both"
        ),
        StepMetric("response_tokens_max", "The most sampled tokens of a usable rollout.", of="both"),
        StepMetric(
            "tool_use",
            "Share of usable rollouts that called a tool, of those that report it or were offered tools.",
            "A fall to 0: the policy gave up its tools.",
            of="both",
        ),
        StepMetric("branches", "Conversations beyond the first in usable rollouts, such as sub-agents.", of="both"),
        StepMetric("judge", "Calls, tokens and cost of the judge, if there is one.", of="both"),
    ),
    "Tokens": (
        StepMetric("sequences", "Number of training sequences."),
        StepMetric("too_long", "Sequences left out because they are longer than `max_tokens`.", "It should be 0."),
        StepMetric("sampled_tokens", "Tokens that the policy sampled in the rollouts of the step."),
        StepMetric(
            "usable_tokens",
            "Those of `sampled_tokens` in usable rollouts that the session's rule trains.",
            "Much less than `sampled_tokens`: rollouts fail, or calls are outside the rule.",
        ),
        StepMetric(
            "gradient_tokens",
            "Those of `usable_tokens` with an advantage other than 0, in sequences of at most `max_tokens`.",
            "0: the step taught nothing.",
        ),
        StepMetric("computed_tokens", "Tokens that the trainer computed, prompts included."),
    ),
    "Updates": (
        StepMetric("loss", "Mean loss of the step. Its size says little: advantages sum to about 0."),
        StepMetric("learning_rate", "Learning rate of the step."),
        StepMetric("grad_norm", "Norm of the gradient before clipping.", "Spikes: lower the learning rate."),
        StepMetric(
            "logprob_gap",
            "Largest difference between a recorded and a recomputed logprob at equal weights, in nats.",
            "Above the rounding of the dtype: sampler and trainer are different models. The run stops.",
        ),
        StepMetric(
            "kl_sampler",
            "Mean over trained tokens of r - 1 - log r, with r = pi(token) / pi_sampled(token).",
            "Above 0.1: too many updates per step, or rollouts that are too old.",
        ),
        StepMetric(
            "kl_start",
            "Mean over trained tokens of q - 1 - log q, with q = pi_start(token) / pi(token). Needs `kl_penalty`.",
            "It should stay within a few nats.",
        ),
        StepMetric(
            "kl_teacher", "Mean over trained tokens of log pi - log pi_teacher, in a distillation.", "It should fall."
        ),
        StepMetric(
            "clip_fraction",
            "Share of trained tokens whose clipped term is the smaller one, so that the clip holds them.",
            "Above 0.3: updates are too large.",
        ),
        StepMetric("ratio_max", "Largest r of the step.", "Above 10: some tokens are far from their sampler."),
        StepMetric(
            "entropy",
            "Mean over trained tokens of the policy's entropy, in nats.",
            "A fast fall: the policy stops exploring. Raise `clip_high` or the temperature.",
        ),
    ),
    "Time": (
        StepMetric("staleness", "Number of usable rollouts by age in weight versions."),
        StepMetric("staleness_mean", "Mean age of usable rollouts in weight versions."),
        StepMetric("rollout_s", "Seconds that the trainer waited for rollouts."),
        StepMetric("train_s", "Seconds of training and publishing."),
        StepMetric("waiting", "rollout_s / (rollout_s + train_s).", "Near 1: sampling is the bottleneck."),
        StepMetric("sampled_tokens_per_s", "Sampled tokens per second of sampling."),
        StepMetric("trained_tokens_per_s", "Computed tokens per second of training."),
        StepMetric("peak_memory_gb", "The most memory that the trainer has used, in GB."),
    ),
}

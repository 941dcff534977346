"""Write docs/metrics.md: the names of a step's numbers, with their formulas. A test compares the list with the loop's events."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
HEAD = """# Metrics

The training loop writes these numbers for each step and each evaluation. They have the same names in `metrics.jsonl`, in
[the view](view.md), and in the trackers, where `train/` or `eval/` stands before them. A number that is not known is left out or
`null`, never 0. The loop is the one of `agentcore-rl train`, Tinker and SageMaker; the other trainers log their own numbers, and
those that mean the same get the names of this page.

`reward` and `reward_ok` compare runs. `kl_sampler`, `clip_fraction` and `logprob_gap` say whether an update can be trusted.
`reward_spread_within` and the shares of groups say whether there was anything to learn.
[Troubleshooting](troubleshooting.md) has the next steps.

`python scripts/metrics_page.py` writes this page.
"""


class StepMetric(NamedTuple):
    """A number of a step, of an evaluation, or of both (``of``). ``watch`` is the meaning of an unusual value."""

    name: str
    of: str
    formula: str
    watch: str = ""


# Under a heading: name | of | formula | watch. A line that is indented further continues the one before.
_TABLE = """
Rewards
  reward | both | Mean over inputs of the mean reward of an input's rollouts. Failures of the agent and of the policy count as
      0. Failures of the infrastructure do not count. | It should rise. If it does not, look at the shares of groups below.
  scored | both | Number of rollouts in `reward`.
  reward_ok | both | The same mean over the rollouts that ended `ok`.
  ok | both | Number of rollouts in `reward_ok`.
  reward_interval | evaluated | 95 % confidence interval of `reward` over held-out inputs: low, high.
  reward_spread | both | Standard deviation of the groups' mean rewards.
  reward_spread_within | both | Mean over groups of the standard deviation of the rewards in a group. | 0: no group teaches
      anything. Advantages are differences within groups.
  groups_all_solved | both | Share of groups in which every scored rollout has a reward of 1 or more. | Near 1: the data is
      too easy.
  groups_all_failed | both | Share of groups in which every scored rollout has a reward of 0 or less. | Near 1: the data is
      too hard, or the agent fails before it can succeed.
  groups_that_differ | step | Number of groups with a rollout that has an advantage other than 0 and was trained. | 0: the
      step taught nothing.
  groups_replaced | step | Number of groups without spread that were replaced since the last step (`replace_up_to`). | Near
      its limit: filter the data (`runs export --rows`).
  reward_by_source | both | `reward` for each value of the field `data_source` of the inputs, if they have it.
  metrics | both | Means of the numbers that the agent returned with its reward.
Rollouts
  groups | both | Number of groups: of inputs, each with its rollouts.
  rollouts | both | Number of rollouts.
  usable | both | Number of rollouts that can be trained: `ok` or failed by the policy, with a reward and sampled tokens, and
      fresh. | Much less than `rollouts`: read `outcomes` and `causes`.
  outcomes | both | Number of rollouts by outcome.
  causes | both | Number of failed rollouts by cause: infrastructure, agent, policy.
  policy_failures | both | Number of the policy's failures by kind, such as tokens, turns, context and calls that do not
      parse. | Many `tokens` or `context`: answers are cut. Raise the limits, or penalize length.
  turns_mean | both | Model calls per usable rollout.
  response_tokens_mean | both | Sampled tokens per usable rollout. | A fall can mean collapse.
  response_tokens_max | both | The most sampled tokens of a usable rollout.
  tool_use | both | Share of usable rollouts that called a tool, of those that report it or were offered tools. | A fall to 0:
      the policy gave up its tools.
  branches | both | Conversations beyond the first in usable rollouts, such as sub-agents.
  judge | both | Calls, tokens and cost of the judge, if there is one.
Tokens
  sequences | step | Number of training sequences.
  too_long | step | Sequences left out because they are longer than `max_tokens`. | It should be 0.
  sampled_tokens | step | Tokens that the policy sampled in the rollouts of the step.
  usable_tokens | step | Those of `sampled_tokens` in usable rollouts that the session's rule trains. | Much less than
      `sampled_tokens`: rollouts fail, or calls are outside the rule.
  gradient_tokens | step | Those of `usable_tokens` with an advantage other than 0, in sequences of at most `max_tokens`. | 0:
      the step taught nothing.
  computed_tokens | step | Tokens that the trainer computed, prompts included.
Updates
  loss | step | Mean loss of the step. Its size says little: advantages sum to about 0.
  learning_rate | step | Learning rate of the step.
  grad_norm | step | Norm of the gradient before clipping. | Spikes: lower the learning rate.
  logprob_gap | step | Largest difference between a recorded and a recomputed logprob at equal weights, in nats. | Above the
      rounding of the dtype: sampler and trainer are different models. The run stops.
  kl_sampler | step | Mean over trained tokens of r - 1 - log r, with r = pi(token) / pi_sampled(token). | Above 0.1: too many
      updates per step, or rollouts that are too old.
  kl_start | step | Mean over trained tokens of q - 1 - log q, with q = pi_start(token) / pi(token). Needs `kl_penalty`. | It
      should stay within a few nats.
  kl_teacher | step | Mean over trained tokens of log pi - log pi_teacher, in a distillation. | It should fall.
  clip_fraction | step | Share of trained tokens whose clipped term is the smaller one, so that the clip holds them. | Above
      0.3: updates are too large.
  ratio_max | step | Largest r of the step. | Above 10: some tokens are far from their sampler.
  entropy | step | Mean over trained tokens of the policy's entropy, in nats. | A fast fall: the policy stops exploring. Raise
      `clip_high` or the temperature.
Time
  staleness | step | Number of usable rollouts by age in weight versions.
  staleness_mean | step | Mean age of usable rollouts in weight versions.
  rollout_s | step | Seconds that the trainer waited for rollouts.
  train_s | step | Seconds of training and publishing.
  waiting | step | rollout_s / (rollout_s + train_s). | Near 1: sampling is the bottleneck.
  sampled_tokens_per_s | step | Sampled tokens per second of sampling.
  computed_tokens_per_s | step | `computed_tokens` per second of training.
  peak_memory_gb | step | The most memory that the trainer has used, in GB.
"""


def _read(table: str) -> dict[str, tuple[StepMetric, ...]]:
    found: dict[str, tuple[StepMetric, ...]] = {}
    heading = ""
    for line in re.sub(r"\n {6}", " ", table.strip()).splitlines():
        if line.startswith("  "):
            found[heading] += (StepMetric(*line.strip().split(" | ")),)
        else:
            heading, found[line] = line, ()
    return found


STEP_METRICS = _read(_TABLE)


def page() -> str:
    """Return the whole page."""
    sections = []
    for heading, metrics in STEP_METRICS.items():
        rows = "\n".join(_row(metric) for metric in metrics)
        sections.append(f"\n## {heading}\n\n| name | value | what to watch |\n|---|---|---|\n{rows}\n")
    return HEAD + "".join(sections)


def _row(metric: StepMetric) -> str:
    only = " Evaluations only." if metric.of == "evaluated" else ""
    return f"| `{metric.name}` | {metric.formula}{only} | {metric.watch} |".replace("  |", " |")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())

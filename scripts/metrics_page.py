"""Write docs/metrics.md: the names of a step's numbers, with their formulas. A test compares the list with the loop's events."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
HEAD = """# Metrics

The training loop writes these numbers for each step and each evaluation. They have the same names in `metrics.jsonl` and in
[the view](view.md). Trackers get them with `train/` or `eval/` before the name. A number that is not known is left out or
`null`, never 0. Tinker and SageMaker sessions use the same loop. The other trainers log their own numbers, and
numbers with the same meaning have the same name.

Begin with three groups of numbers:

- `reward` and `reward_ok` show whether the agent gets better. Use them to compare runs.
- `reward_spread_within` and the shares of groups show whether there was anything to learn.
- `kl_sampler`, `clip_fraction`, and `logprob_gap` show whether an update can be trusted.

These terms are in the formulas:

- A *logprob* is the natural logarithm of a token's probability. Its unit is the nat.
- `pi` is the probability with the weights in training. `pi_sampled` is the probability with the weights that generated the token.
- A *weight version* counts the updates of the weights in the engine.
- The *advantage* of a token is positive if its rollout was better than the others of the group, and negative if it was worse.

[Troubleshooting](troubleshooting.md#the-reward-does-not-rise) shows what to do about an unusual number.

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
  reward | both | The mean reward of the rollouts of each input, averaged over the inputs. Failures of the agent and of
      the policy count as 0. Failures of the infrastructure do not count. | It should rise. If it does not, look at the shares
      of groups below.
  scored | both | Number of rollouts in `reward`.
  reward_ok | both | The same mean over the rollouts that ended `ok`.
  ok | both | Number of rollouts in `reward_ok`.
  reward_interval | evaluated | 95 % confidence interval of `reward` over held-out inputs: low, high.
  reward_spread | both | Standard deviation of the groups' mean rewards.
  reward_spread_within | both | The standard deviation of the rewards in each group, averaged over the groups. | 0: no group
      teaches anything, because advantages are differences within groups.
  groups_all_solved | both | Share of groups in which every scored rollout has a reward of 1 or more. | Near 1: the data is
      too easy.
  groups_all_failed | both | Share of groups in which every scored rollout has a reward of 0 or less. | Near 1: the data is
      too hard, or the agent fails before it can succeed.
  groups_that_differ | step | Number of groups that taught something: at least one trained rollout has an advantage other
      than 0. | 0: the
      step taught nothing.
  groups_replaced | step | Number of groups with equal rewards that were replaced since the last step (`replace_up_to`). They
      count in the other numbers of rewards and rollouts. | Near its limit: filter the data (`runs export --rows`).
  reward_by_source | both | `reward` for each value of the field `data_source` of the inputs, if they have it.
  metrics | both | Means of the numbers that the agent returned with its reward.
Rollouts
  groups | both | Number of groups. A group is an input with all its rollouts.
  rollouts | both | Number of rollouts.
  usable | both | Number of rollouts that can be trained. Such a rollout ended `ok` or with a failure of the policy. It has a
      reward and sampled tokens, is at most `max_staleness` weight versions old, and is not longer than `max_tokens`. | Much
      less than `rollouts`: read `outcomes` and `causes`.
  outcomes | both | Number of rollouts by outcome.
  causes | both | Number of failed rollouts by cause: infrastructure, agent, policy, scorer.
  policy_failures | both | Number of the policy's failures by kind, such as tokens, turns, context and calls that do not
      parse. | Many `tokens` or `context`: answers are cut. Raise the limits, or penalize length.
  turns_mean | both | Model calls per usable rollout.
  response_tokens_mean | both | Sampled tokens per usable rollout. | A fall can mean collapse.
  response_tokens_max | both | Largest number of sampled tokens in a usable rollout.
  tool_use | both | Share of usable rollouts that called a tool. Rollouts without any tools do not count. | A fall to 0:
      the policy has stopped calling its tools.
  branches | both | Number of conversations in usable rollouts besides the main ones, such as those of sub-agents.
  judge | both | Calls, tokens and cost of the judge, if there is one.
Tokens
  sequences | step | Number of training sequences.
  too_long | step | Sequences of rollouts that are longer than `max_tokens`. | It should be 0.
  sampled_tokens | both | Tokens that the policy sampled in the rollouts.
  usable_tokens | both | The part of `sampled_tokens` in usable rollouts, and in conversations that are trained
      (`train_on`). | Much less than
      `sampled_tokens`: rollouts fail, or many calls are in other conversations.
  gradient_tokens | step | The part of `usable_tokens` with an advantage other than 0. | 0: the step taught nothing.
  computed_tokens | step | Tokens that the trainer computed, prompts included.
Updates
  loss | step | Mean loss of the step. Its size means little, because the advantages of a group sum to about 0.
  learning_rate | step | Learning rate of the step.
  grad_norm | step | Norm of the gradient before clipping. | Spikes: lower the learning rate.
  logprob_gap | step | Largest difference between a logprob of the engine and the logprob that the trainer computes with the same
      weights, in nats. | Larger
      than rounding errors: engine and trainer compute different models. The run stops.
  kl_sampler | step | Distance from the policy that sampled the tokens: mean of r - 1 - log r over trained tokens, with
      r = pi(token) / pi_sampled(token). | Above 0.1: too many updates per step, or rollouts that are too old.
  kl_start | step | Distance from the policy at the start: mean of q - 1 - log q over trained tokens, with
      q = pi_start(token) / pi(token). Needs `kl_penalty`. | It should stay within a few nats.
  kl_teacher | step | Distance from the teacher of a distillation: mean of log pi - log pi_teacher over trained tokens. | It
      should fall.
  clip_fraction | step | Share of trained tokens whose change is limited by the clip or by `dual_clip`. | Above
      0.3: updates are too large.
  ratio_max | step | Largest r of the step. | Above 10: the probability of some tokens has changed much since they were sampled.
  entropy | step | Mean entropy of the policy over trained tokens, in nats. | A fast fall: the policy stops exploring. Raise
      `clip_high` or the temperature.
Time
  staleness | step | Number of usable rollouts by age. The age is the number of weight versions between start and training.
  staleness_mean | step | Mean age of usable rollouts in weight versions.
  rollout_s | step | Seconds that the trainer waited for rollouts.
  train_s | step | Seconds of training and publishing.
  waiting | step | rollout_s / (rollout_s + train_s). | Near 1: sampling is the bottleneck.
  sampled_tokens_per_s | step | Sampled tokens, divided by the seconds of sampling.
  computed_tokens_per_s | step | `computed_tokens`, divided by the seconds of training.
  peak_memory_gb | step | Largest memory of the trainer so far, in GB.
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

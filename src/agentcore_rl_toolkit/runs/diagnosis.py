"""Reasons why a run does not learn: sentences with a cause, a number, and what to do.

`diagnose` reads the last steps of a run's folder. The page, `runs show`, and `train` show the same.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .reader import MOST_FAILURES, Query, RunReader
from .steps import mean

RECENT = 8  # training steps that are examined: enough to see a state, few enough to leave out repaired faults
TREND = 6  # steps that a trend needs at least
STEADY = 3  # steps after which equal rewards are no accident of the first batch
FEW = 20  # rollouts that a correlation needs at least
FAILED, CUT, UNPARSED = 0.25, 0.2, 0.1  # shares of rollouts above which a failure explains a run
USABLE = 0.1  # and below which too few are trained
SAME = 0.5  # share of groups without different rewards
OPPOSED = -0.5  # correlation of two numbers that came with the reward
COLLAPSED, LOW_NATS = 0.25, 0.3  # entropy: what is left of the first steps', and the most that is low
# Numbers of an update with their limits of `metrics.md`.
UPDATES = (
    ("kl_sampler", 0.1, "the KL divergence from the engine is {:.2g}"),
    ("clip_fraction", 0.3, "{:.0%} of the tokens are clipped"),
    ("ratio_max", 10.0, "the largest ratio of a step is {:.3g} on average"),
)
GAP_GREW, GAP = 10.0, 0.05  # times the first steps' gap, and the least gap that matters, in nats
STALE = 3.0  # weight versions
WAITING, WAITED_S = 0.8, 10.0  # share of the time, and the least seconds of a step that matter
ROSE = 0.1  # a rise of the reward in training that an evaluation should show a quarter of


ADVICE = {
    "agent": "Open one of these rollouts, read its traceback, and repair the agent. Test it with `agentcore-rl invoke`.",
    "infrastructure": "`agentcore-rl doctor [--aws]` tests the services. `runs show --in-flight` lists what rollouts wait for.",
    "scorer": "Read the traceback of one of these rollouts, repair the scorer, and test it with `agentcore-rl eval`.",
    "policy": "The policy failed these rollouts, for example at a limit of tokens or turns. Raise that limit, or reward rollouts "
    "that stay within it.",
    "not_usable": "A usable rollout ended ok or was failed by the policy, has a reward, is not too old, and was sampled through "
    "the gateway. Open one of these rollouts to see what is missing.",
    "unparsed": "`agentcore-rl doctor` checks the chat template. If the template is right, teach the format first with "
    "`agentcore-rl sft`.",
    "cut": "Raise `max_tokens` in `sampling_params` or the context of the engine, or give shorter replies a higher reward.",
    "all_fail": "Open a rollout and check that its reward is right. If it is, give partial reward, use easier inputs, teach the "
    "task first with `agentcore-rl sft`, or raise `rollouts`.",
    "all_pass": "Use harder inputs. `runs export --rows DATA --pass-rate 0.1:0.9` keeps the inputs that are solved sometimes.",
    "no_spread": "The policy learns from the differences between the rollouts of an input. Make the reward finer, or raise "
    "`rollouts` or the temperature.",
    "opposed": "The reward pays for both, so it hardly rises. Change their weights, or make one a condition of the reward.",
    "entropy": "Raise `clip_high` or the temperature, lower the learning rate, or start again from an earlier checkpoint.",
    "not_finite": "Lower the learning rate or set `max_grad_norm`, and start again from a checkpoint before these steps.",
    "updates": "Lower the learning rate, use fewer minibatches per step, or lower `max_staleness`.",
    "gap": "Engine and trainer should be the same model. Check that new weights reach the engine, and the dtype of both.",
    "stale": "Lower `max_staleness`, make the rollouts shorter, or run more rollouts at the same time.",
    "waiting": "Add engines or raise `max_concurrent`. The page of a long rollout shows where its time went.",
    "held_out": "The policy learns its inputs by heart, or how to please the reward. Add inputs, stop earlier, and read rollouts "
    "with a high reward.",
}


@dataclass(frozen=True)
class Finding:
    """A cause. ``query`` selects the rollouts that ``text`` counts, if it counts rollouts."""

    name: str
    text: str
    advice: str
    query: Mapping[str, Any] = field(default_factory=dict)


def diagnose(run: RunReader, steps: Sequence[Mapping[str, Any]] | None = None) -> list[Finding]:
    """Return the causes in the last `RECENT` training steps, or in the last evaluation, nearest to the rollouts first.

    An earlier cause often explains a later one. ``steps`` are `RunReader.steps`, if the caller has them.
    """
    steps = run.steps() if steps is None else steps
    trained = [step for step in steps if step["phase"] == "train" and step["step"] is not None]
    recent = trained[-RECENT:] or list(steps[-1:])
    if not recent:
        return []
    by_step = {step["step"]: step for step in trained}
    logged: dict[int, Any] = {}
    for event in reversed(
        run.metrics()
    ):  # a resumed run repeats steps: what stands before an earlier step does not count
        number = event.get("step")
        if event.get("event") == "step" and isinstance(number, int) and number < next(reversed(logged), math.inf):
            logged[number] = event
    numbers = [{**by_step.get(n, {}), **logged.get(n, {})} for n in sorted({*by_step, *logged} - {None})]
    window = _Window(run, recent)
    findings = [
        *_failures(window),
        *_calls(window),
        *(_groups(window) if len(trained) >= STEADY else ()),
        *_opposed_numbers(window),
        *_updates(numbers),
        *_held_out(numbers, [step for step in steps if step["phase"] != "train" and step["reward"] is not None]),
    ]
    solved = any(finding.name == "all_pass" for finding in findings)  # a policy that is right has no reason to explore
    return [finding for finding in findings if not (solved and finding.name == "entropy")]


def _finding(name: str, text: str, query: Mapping[str, Any] | None = None, *, advice: str | None = None) -> Finding:
    return Finding(name, text, ADVICE[advice or name], query or {})


class _Window:
    """The steps that are looked at, and the query of their rollouts."""

    def __init__(self, run: RunReader, steps: Sequence[Mapping[str, Any]]) -> None:
        self.run, self.steps = run, steps
        self.query = {"phase": steps[0]["phase"]}
        if steps[0]["step"] is not None:
            self.query["number_from"] = steps[0]["number"]
        named = f"the last {len(steps)} steps" if len(steps) > 1 else "the last step"
        self.name = named if self.query["phase"] == "train" else f"the evaluation {steps[0]['at']!r}"

    def sum(self, name: str) -> int:
        return sum(step[name] or 0 for step in self.steps)

    def reward(self, **which: bool) -> float | None:
        """Return the mean reward of the rollouts that fit, None if none has a reward."""
        return mean([*self.run.numbers(Query(**{**self.query, **which}))["reward"].values()])


def _failures(window: _Window) -> Iterator[Finding]:
    total, usable = window.sum("rollouts"), window.sum("usable")
    errors = window.run.failures(Query(**window.query))
    failed = window.run.count(Query(**window.query, failed=True))
    if errors and failed >= FAILED * total:
        first = errors[0]
        text = f"{failed} of {total} rollouts of {window.name} failed"
        advice = first["cause"] if first["cause"] in ADVICE else "policy"  # a writer's own cause
        if first["rollouts"] >= failed / 2:
            text += f", {first['rollouts']} of them with {first['error'] or first['outcome']!r}."
            which = {"error": first["shape"], "outcome": first["outcome"]}
            yield _finding("one_error", text, {**window.query, **which}, advice=advice)
        else:
            reasons = f"{len(errors)}{' or more' if len(errors) == MOST_FAILURES else ''} different reasons"
            yield _finding("failures", f"{text}, for {reasons}.", {**window.query, "failed": True}, advice=advice)
    if window.query["phase"] == "train" and usable < USABLE * total:
        text = f"{f'Only {usable}' if usable else 'None'} of the {total} rollouts of {window.name} can be used for training."
        yield _finding("not_usable", text, {**window.query, "usable": False})


def _calls(window: _Window) -> Iterator[Finding]:
    total, unparsed, cut = (window.sum(name) for name in ("rollouts", "unparsed", "cut"))
    for name, count, share, what in (
        ("unparsed", unparsed, UNPARSED, "a tool call that does not parse"),
        ("cut", cut, CUT, "a reply that was cut off at the limit of tokens"),
    ):
        if count and count >= share * total:
            text = f"{count} of {total} rollouts ({count / total:.0%}) of {window.name} contain {what}."
            having, others = (window.reward(**{name: value}) for value in (True, False))
            if having is not None and others is not None:
                text += f" Their mean reward is {having:.2f}. That of the others is {others:.2f}."
            yield _finding(name, text, {**window.query, name: True})


def _groups(window: _Window) -> Iterator[Finding]:
    groups, differ, failed, solved = (window.sum(f"groups{n}") for n in ("", "_differ", "_failed", "_solved"))
    if not groups or groups - differ < SAME * groups or (window.sum("gradient_tokens") and not differ):
        return  # advantages of a teacher need no rewards that differ
    kinds = (("all_fail", failed, "0 or less", {"reward_to": 0}), ("all_pass", solved, "1 or more", {"reward_from": 1}))
    equal: tuple[str, int, str, dict[str, float]] = ("no_spread", groups - differ, "equal", {"gradient": False})
    name, count, what, query = next((kind for kind in kinds if kind[1] > groups / 2), equal)
    text = (
        f"In {'all ' if count == groups else f'{count} of '}{groups} groups of {window.name}, all rewards are {what}, "
    )
    text += "so these groups teach nothing."
    if name == "no_spread" and failed + solved:
        text += f" {failed} of these groups have rewards of 0 or less, and {solved} of 1 or more."
    yield _finding(name, text, {**window.query, **query})


def _opposed_numbers(window: _Window) -> Iterator[Finding]:
    columns = window.run.numbers(Query(**window.query))
    reward = columns.pop("reward", {})
    helpful = {name: values for name, values in columns.items() if (_correlation(values, reward) or -1.0) >= 0}
    pairs = itertools.combinations(sorted(helpful), 2)
    each = [(_correlation(helpful[one], helpful[other]) or 0.0, one, other) for one, other in pairs]
    found, one, other = min(each, default=(0.0, "", ""))
    if found <= OPPOSED:
        text = f"The numbers {one} and {other} oppose each other: if one rises, the other falls. Their correlation is "
        yield _finding("opposed", f"{text}{found:.2f} over the rollouts of {window.name}.", window.query)


def _correlation(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    both = sorted(one.keys() & other.keys())
    a, b = [one[n] for n in both], [other[n] for n in both]
    try:
        return statistics.correlation(a, b) if len(both) >= FEW else None
    except (statistics.StatisticsError, OverflowError):  # one is constant, or too large
        return None


def _updates(numbers: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Find what is wrong with the updates: their size, the gap, the age of rollouts, the time."""

    def known(name: str) -> list[float]:
        return [v for step in numbers if isinstance(v := step.get(name), int | float) and math.isfinite(v)]

    def lately(name: str) -> float | None:
        return mean(known(name)[-RECENT:])

    losses = [(step.get("loss"), step.get("grad_norm")) for step in numbers[-RECENT:]]
    broken = sum(any(isinstance(v, float) and not math.isfinite(v) for v in each) for each in losses)
    if broken:
        text = f"In {broken} of the last {len(losses)} steps, the loss or the gradient norm is not a finite number."
        yield _finding("not_finite", text)
    entropy = known("entropy")
    if len(entropy) >= TREND:
        first, last = statistics.fmean(entropy[:3]), statistics.fmean(entropy[-3:])
        if last < min(LOW_NATS, COLLAPSED * first):
            text = f"The entropy fell from {first:.2g} to {last:.2g} nats. The policy repeats itself and no longer explores."
            yield _finding("entropy", text)
    sizes = [(v > limit, what.format(v)) for name, limit, what in UPDATES if (v := lately(name)) is not None]
    if any(large for large, _ in sizes):
        text = f"The updates are too large. In the last steps, {', and '.join(what for _, what in sizes)}."
        yield _finding("updates", text)
    gaps = known("logprob_gap") or known("gap_max")
    if gaps and gaps[-1] > max(GAP, GAP_GREW * (before := statistics.median(gaps[:3]))):
        text = f"The logprobs of engine and trainer differ by {gaps[-1]:.2g} nats, and at first by {before:.2g}."
        yield _finding("gap", text)
    age = lately("staleness_mean") or lately("staleness") or 0.0
    if age > STALE:
        yield _finding("stale", f"The rollouts are {age:.1f} weight versions old when the trainer uses them.")
    waited, trained = lately("rollout_s") or 0.0, lately("train_s")
    if trained is not None and waited > max(WAITED_S, WAITING * (waited + trained)):
        yield _finding("waiting", f"The trainer waits for rollouts {waited / (waited + trained):.0%} of the time.")


def _held_out(numbers: Sequence[Mapping[str, Any]], evaluated: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    rewards = [step["reward"] for step in numbers if step.get("reward") is not None]
    if len(rewards) < TREND or len(evaluated) < 2:
        return
    third, begin, end = max(2, len(rewards) // 3), evaluated[0], evaluated[-1]
    first, last = statistics.fmean(rewards[:third]), statistics.fmean(rewards[-third:])
    chance = math.hypot(*((each["interval"][1] - each["interval"][0]) / 2 for each in (begin, end)))
    if last - first > ROSE and end["reward"] - begin["reward"] < min((last - first) / 4, last - first - chance):
        text = f"The reward in training rose from {first:.2f} to {last:.2f}, but the reward on held-out inputs went "
        yield _finding("held_out", f"{text}from {begin['reward']:.2f} to {end['reward']:.2f}.")

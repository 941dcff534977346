"""The test tasks of telecom, and some of retail and airline, end to end here: published solution, nothing, half of it.

The agent runs in its own environment, one session per rollout; the model is a function that takes the published actions one by
one. Then `experiment.py` trains one seed, shorter than the README's. Runs in the toolkit's environment:
`python examples/strands_taubench_agent/proof.py [--quick] [--json FILE]`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from experiment import HERE, agent_python

from agentcore_rl_toolkit.gateway.testing import ToolCall
from harness import Proof, Result, mean, parser, tool_calls

# Of `experiment.py`. The quick one only shows that the command works.
TRAINING = ("--steps=6",)
QUICK_TRAINING = ("--warm-steps=10", "--careless-steps=2", "--steps=1", "--groups=2", "--rollouts=4")
NUMBER = re.compile(r"number:? (\d+)")
Solution = dict[str, Any]
Decide = Callable[[list[dict[str, Any]], list[dict[str, Any]]], Any]


def solutions(domain: str, most: int) -> list[Solution]:
    """Tasks of the test split with their published actions, as `data.py --solutions` prints them; 0: all."""
    command = [agent_python(), str(HERE / "data.py"), "--domain", domain, "--solutions", str(most)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return [json.loads(line) for line in found.stdout.splitlines()]


def payloads(wanted: Sequence[Solution]) -> list[dict[str, Any]]:
    """Return the payloads. The scripted model recognizes a task by its number."""
    sent = []
    for number, solution in enumerate(wanted):
        row: dict[str, Any] = {"domain": solution["domain"], "task_id": solution["task_id"]}
        if solution["domain"] == "telecom":
            row |= {"ticket_number": number, "rendering": "compact" if number % 2 else "full"}
        else:
            row["user_lines"] = [
                f"My request has the number {number}. Please take care of it.",
                "Thank you, that is all.",
            ]
        sent.append(row)
    return sent


def solver(wanted: Sequence[Solution], *, take: Callable[[int], int]) -> Decide:
    """Takes the first ``take(n)`` of a task's n actions, one per turn, then writes the required text."""

    def decide(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
        first = next(message for message in messages if message["role"] == "user")
        match = NUMBER.search(str(first["content"]))
        if match is None:
            raise ValueError(f"no number in {first['content']!r}")
        solution = wanted[int(match[1])]
        actions = solution["actions"][: take(len(solution["actions"]))]
        taken = sum(len(message.get("tool_calls") or []) for message in messages)
        if taken < len(actions):
            name, arguments = actions[taken]
            return [ToolCall(name, arguments)]
        return " ".join(solution["communicate"]) or "done"

    return decide


def share(results: Sequence[Result], name: str) -> float:
    """Mean of a metric, a rollout without it counted as 0."""
    return sum(float((r.result.get("metrics") or {}).get(name, 0.0)) for r in results) / len(results)


def main() -> None:
    options = parser(__doc__).parse_args()
    with Proof(example=HERE, framework="Strands Agents", options=options) as proof:
        for domain, most in (("telecom", 0), ("retail", 1 if proof.quick else 4), ("airline", 1 if proof.quick else 4)):
            found = solutions(domain, most)
            wanted = found[::7] if domain == "telecom" and proof.quick else found
            rows = payloads(wanted)
            oracle = proof.run(rows, solver(wanted, take=lambda n: n))
            nothing = proof.run(rows, solver(wanted, take=lambda n: 0))
            proof.check_all_ok([*oracle, *nothing], f"{domain}: every rollout ends ok with a reward")
            _compare(proof, domain, oracle, nothing)
            proof.row(
                rollouts=len(oracle) + len(nothing),
                oracle_reward=mean(oracle),
                noop_reward=mean(nothing),
                tool_calls=tool_calls(oracle, nothing),
                note=f"{domain}, {len(wanted)} test tasks",
            )
            if domain == "telecom":
                several = [k for k, s in enumerate(wanted) if len(s["actions"]) > 1]
                half = proof.run([rows[k] for k in several], solver(wanted, take=lambda n: n // 2))
                value = share(half, "published")
                proof.check("telecom: half of a solution earns nothing", value=value, target=0.0, ok=value == 0.0)
        _train(proof)


def _train(proof: Proof) -> None:
    """Train one seed. A gain is not required, because 40 rollouts before and after cannot show a small one."""
    out = proof.folder / "trained"
    chosen = QUICK_TRAINING if proof.quick else TRAINING
    command = [sys.executable, str(HERE / "experiment.py"), "--out", str(out), "--seeds=0", "--repeats=1", *chosen]
    proof.train(command, out / "seed-0", note="telecom, compact, GRPO from the warm start", must_gain=False)


def _compare(proof: Proof, domain: str, oracle: Sequence[Result], nothing: Sequence[Result]) -> None:
    bases = ("published", "actions") if domain == "telecom" else ("published",)
    for basis in bases:
        value = share(oracle, basis)
        proof.check(f"{domain}: the published solution earns 1 ({basis})", value=value, target=1.0, ok=value == 1.0)
        value = share(nothing, basis)
        proof.check(f"{domain}: doing nothing earns 0 ({basis})", value=value, target=0.0, ok=value == 0.0)


if __name__ == "__main__":
    main()

"""The proof of the math agent: an oracle, doing nothing, a wrong solver, both evaluations, and a training.

python examples/strands_math_agent/proof.py [--quick] [--data gsm8k/test.jsonl] [--rollouts N] [--json FILE]
"""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
QUICK_STEPS = 3
sys.path.insert(0, str(HERE.parent))
from word_problem_proof import options, prove  # noqa: E402  (the examples are not a package)


def evaluations(proof, task):
    """Both scripts print the oracle's reward on the same rows."""
    rows = proof.folder / "rows.jsonl"
    few = task.payloads[:5]
    rows.write_text("".join(json.dumps({"id": f"row-{i}", **row}) + "\n" for i, row in enumerate(few)))
    proof.model.decide = task.oracle
    stack = proof.stack
    for name in ("evaluate", "evaluate_async"):
        command = [sys.executable, str(HERE / f"{name}.py"), str(rows), "--agent", stack.agent_arn]
        command += ["--bucket", stack.store, "--endpoint-url", stack.runtime_url, "--exp-id", name]
        command += [
            "--base-url",
            f"{proof.model.url}/v1",
            "--model-id",
            "scripted",
            "--out",
            str(proof.folder / "runs"),
        ]
        environment = {**os.environ, **stack.environment()}
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=environment)
        said = done.stdout.partition("\n")[0]
        print(f"{name}.py: {said or done.stderr[-2000:]}")
        summary = proof.folder / "runs" / name / "summary.json"
        mean = json.loads(summary.read_text())["mean"] if done.returncode == 0 else None
        proof.check(f"{name}.py finds the oracle's reward", value=mean, target=1.0, ok=mean == 1.0)


def training(proof):
    """Run the quickstart, which trains `arithmetic_app.py` of this folder."""
    run = proof.folder / "trained"
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "quickstart", "--out", str(run)]
    if proof.quick:
        command += ["--steps", str(QUICK_STEPS)]
    proof.train(command, run, note="sums, arithmetic_app.py, the built-in policy", must_gain=not proof.quick)


def more(proof, task):
    evaluations(proof, task)
    training(proof)


if __name__ == "__main__":
    prove(HERE, "Strands Agents", given=options(__doc__), more=more)

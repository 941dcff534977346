"""Search for a better system prompt of a mail sorter, with two scripted models over HTTP, or with real ones.

python examples/signals/prompt/run.py [--seed N] [--out FOLDER]
    [--model-url URL --model-name NAME] [--reflect-url URL --reflect-model NAME]    # keys: MODEL_KEY, AGENTCORE_RL_REFLECT_KEY
"""

import argparse
import contextlib
import json
import subprocess
import sys
from pathlib import Path

import mail

from agentcore_rl_toolkit.gateway.testing import ScriptedModel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    for name in ("--model-url", "--model-name", "--reflect-url", "--reflect-model"):
        parser.add_argument(name)
    given = parser.parse_args()
    out = given.out or Path(f"runs/prompt-{given.seed}")
    out.mkdir(parents=True, exist_ok=True)
    for name, seed in (("train", 2 * given.seed), ("eval", 2 * given.seed + 1)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mail.rows(40, seed)))
    with contextlib.ExitStack() as exits:

        def scripted(decide):
            print(f"scripted model: {decide.__name__}", file=sys.stderr)
            return exits.enter_context(ScriptedModel(decide)).url + "/v1"

        words = ["--agent", Path(__file__).with_name("agent.py"), "--model", "none", "--max-rollouts", "400"]
        words += ["--data", out / "train.jsonl", "--eval-data", out / "eval.jsonl", "--out", out / "run"]
        words += ["--reflect-url", given.reflect_url or scripted(mail.reflect)]
        words += ["--reflect-model", given.reflect_model or "scripted", "--set", f"seed={given.seed}"]
        words += ["--session-env", f"MODEL_URL={given.model_url or scripted(mail.sort)}"]
        words += ["--session-env", f"MODEL_NAME={given.model_name or 'scripted'}"]
        words += ["--session-env", "MODEL_KEY"] if given.model_url else []
        command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "optimize", *map(str, words)]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

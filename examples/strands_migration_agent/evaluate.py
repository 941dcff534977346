"""Evaluate the deployed agent on Java projects with your model. It prints a table of the projects, and writes all results.

    python evaluate.py --agent ARN --bucket BUCKET --base-url http://MODEL/v1 --model-id NAME

Without --data, it runs the eight projects of the example. A file of --data has one payload per line, such as
{"repo_uri": "s3://bucket/repo.tar.gz"}. AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET replace --agent and --bucket.
AGENTCORE_RL_MODEL_API_KEY is the key of the model. `evaluate_async.py` is the same for code that runs in an event loop.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.client import BatchItem
from agentcore_rl_toolkit.client.evaluation import EvalRow, read_rows, reward_of, summarize, write_results

PROJECTS = Path(__file__).parent / "projects"


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="file with one payload per line [the projects of this folder]")
    parser.add_argument("--agent", default=os.environ.get("AGENTCORE_AGENT_ARN"), help="ARN of the deployed rl_app.py")
    parser.add_argument("--bucket", default=os.environ.get("AGENTCORE_S3_BUCKET"), help="bucket or store URL")
    parser.add_argument("--base-url", required=True, help="an OpenAI-compatible endpoint that sessions reach")
    parser.add_argument("--model-id", required=True)
    parser.add_argument("--endpoint-url", help="another AgentCore endpoint, such as a local runtime")
    parser.add_argument("--exp-id", default=time.strftime("migration-%Y%m%d-%H%M%S"))
    parser.add_argument("--max-turns", type=int, help="model calls of each rollout [the agent's: 60]")
    parser.add_argument("--repeat", type=int, default=1, help="rollouts of each project [%(default)s]")
    parser.add_argument(
        "--concurrency", type=int, default=16, help="sessions at the same time; each builds with Maven [%(default)s]"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for each rollout [%(default)g]")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="results go to OUT/EXP_ID [%(default)s]")
    given = parser.parse_args(arguments)
    if not given.agent or not given.bucket:
        parser.error("--agent and --bucket are needed (or AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET)")
    return given


def rows_of(given: argparse.Namespace) -> list[EvalRow]:
    """Return the rows, each --repeat times."""
    if given.data is not None:
        rows = read_rows(given.data)
    else:
        names = sorted(folder.name for folder in PROJECTS.iterdir() if (folder / "project.toml").is_file())
        rows = [EvalRow(input_id=name, payload={"project": name}) for name in names]
    more = {} if given.max_turns is None else {"max_turns": given.max_turns}
    rows = [EvalRow(input_id=row.input_id, payload={**more, **row.payload}) for row in rows]
    return [row for row in rows for _ in range(given.repeat)]


def client_of(given: argparse.Namespace) -> RolloutClient:
    return RolloutClient(
        given.agent,
        given.bucket,
        given.exp_id,
        base_url=given.base_url,
        model_id=given.model_id,
        api_key=os.environ.get("AGENTCORE_RL_MODEL_API_KEY", "none"),
        endpoint_url=given.endpoint_url,
    )


def table(items: Sequence[BatchItem]) -> str:
    """Return a line for each project: rollouts, builds, complete successes, mean reward, seconds, and the last problem."""
    lines = [f"{'project':<24}{'rollouts':>9}{'solved':>8}{'reward':>8}{'seconds':>9}  trouble"]
    for name in sorted({str(item.input_id) for item in items}):
        mine = [item for item in items if str(item.input_id) == name]
        rewards = [reward for item in mine if (reward := reward_of(item)) is not None]
        mean = f"{sum(rewards) / len(rewards):.2f}" if rewards else "-"
        seconds = [item.elapsed for item in mine if item.elapsed is not None]
        spent = f"{sum(seconds) / len(seconds):.0f}" if seconds else "-"
        trouble = next((f"{item.outcome}: {item.error}" for item in reversed(mine) if not item.success), "")
        solved = sum(reward == 1.0 for reward in rewards)
        lines.append(f"{name:<24}{len(mine):>9}{solved:>8}{mean:>8}{spent:>9}  {trouble[:60]}".rstrip())
    return "\n".join(lines)


def finish(given: argparse.Namespace, items: list[BatchItem], elapsed_s: float) -> None:
    """Print the table and the summary, and write every result."""
    summary = summarize(items, elapsed_s)
    write_results(given.out / given.exp_id, items, summary)
    print(f"{table(items)}\n\n{summary}\nresults: {given.out / given.exp_id}")


def batch_options(given: argparse.Namespace, rows: Sequence[EvalRow]) -> dict[str, Any]:
    """Return the arguments of `run_batch` and `run_batch_async`. With the ledger, finished rollouts are not repeated."""
    folder = given.out / given.exp_id
    folder.mkdir(parents=True, exist_ok=True)
    ledger = folder / "ledger.jsonl"
    return {
        "max_concurrent_sessions": given.concurrency,
        "timeout": given.timeout,
        "input_ids": [row.input_id for row in rows],
        "progress": True,
        "ledger": ledger,
        "resume": ledger.exists(),
    }


def main() -> None:
    given = options()
    rows = rows_of(given)
    began_s = time.monotonic()
    with client_of(given) as client:
        items = list(client.run_batch([row.payload for row in rows], **batch_options(given, rows)))
    finish(given, items, time.monotonic() - began_s)


if __name__ == "__main__":
    main()

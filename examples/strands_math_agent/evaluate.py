"""Evaluate the deployed agent on rows of `prepare.py`, with a model of yours.

    python evaluate.py rows.jsonl --agent ARN --bucket BUCKET --base-url http://MODEL/v1 --model-id NAME

AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET stand for --agent and --bucket; AGENTCORE_RL_MODEL_API_KEY is the model's key.
`agentcore-rl eval` does the same with more options. `evaluate_async.py` is the same for code that runs in an event loop.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.client.evaluation import read_rows, summarize, write_results


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--agent", default=os.environ.get("AGENTCORE_AGENT_ARN"), help="ARN of the deployed rl_app.py")
    parser.add_argument("--bucket", default=os.environ.get("AGENTCORE_S3_BUCKET"), help="bucket or store URL")
    parser.add_argument("--base-url", required=True, help="an OpenAI-compatible endpoint that sessions reach")
    parser.add_argument("--model-id", required=True)
    parser.add_argument("--endpoint-url", help="another AgentCore endpoint, such as a local runtime")
    parser.add_argument("--exp-id", default=time.strftime("gsm8k-%Y%m%d-%H%M%S"))
    parser.add_argument("--concurrency", type=int, default=32, help="[%(default)s]")
    parser.add_argument("--limit", type=int, help="only the first rows")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each rollout [%(default)g]")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="results go to OUT/EXP_ID [%(default)s]")
    given = parser.parse_args(arguments)
    if not given.agent or not given.bucket:
        parser.error("--agent and --bucket are needed (or AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET)")
    return given


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


def finish(given: argparse.Namespace, items: list[Any], elapsed_s: float) -> None:
    """Print the summary and write every result."""
    summary = summarize(items, elapsed_s)
    write_results(given.out / given.exp_id, items, summary)
    print(f"{summary}\nresults: {given.out / given.exp_id}")


def main() -> None:
    given = options()
    rows = read_rows(given.data)[: given.limit]
    began_s = time.monotonic()
    with client_of(given) as client:
        payloads, names = [row.payload for row in rows], [row.input_id for row in rows]
        items = list(client.run_batch(payloads, given.concurrency, given.timeout, input_ids=names, progress=True))
    finish(given, items, time.monotonic() - began_s)


if __name__ == "__main__":
    main()

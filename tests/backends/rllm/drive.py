"""Run by test_rllm_checkout.py with rLLM's checkout on the path: rLLM's own AgentCore runtime over our client."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid

from rllm.engine.remote_runtime.agentcore_runtime import AgentCoreRuntime
from rllm.engine.remote_runtime.protocol import RemoteRuntimeConfig, TaskSubmission


async def main() -> None:
    arn, store = sys.argv[1:3]
    settings = {"agent_runtime_arn": arn, "s3_bucket": store, "tps_limit": 100}
    runtime = AgentCoreRuntime(RemoteRuntimeConfig(enabled=True, agentcore=settings), exp_id="rllm", model_id="policy")
    runtime.initialize()
    payloads = [{"reward": 0.5}, {"fail": True}, {"reward": 1.0, "sleep_s": 600}]
    tasks = [
        TaskSubmission(
            task=p, session_id=str(uuid.uuid4()), task_id=f"task-{i}", inference_url=f"http://gw/sessions/{i}/v1"
        )
        for i, p in enumerate(payloads)
    ]
    results = await runtime.execute_tasks(tasks, timeout=15.0)
    runtime.shutdown()
    shown = [
        {
            "finished": r.finished,
            "reward": r.reward,
            "error": r.error,
            "reason": r.termination_reason.name if r.termination_reason else None,
            "elapsed": r.elapsed,
            "metrics": (r.raw_result or {}).get("metrics"),
        }
        for r in results
    ]
    print("RESULTS " + json.dumps(shown))


asyncio.run(main())

"""An agent without a model, for rLLM's runtime to drive: answers, fails or never ends, as its payload says."""

import asyncio

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@app.rollout_entrypoint
async def invoke_agent(payload):
    if payload.get("fail"):
        raise RuntimeError("injected failure")
    await asyncio.sleep(payload.get("sleep_s", 0))
    return {"rewards": [0.0, payload["reward"]], "metrics": {"steps": 2, "base_url": payload["_rollout"]["base_url"]}}


if __name__ == "__main__":
    app.run()

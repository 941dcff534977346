"""The agents of `basic_app.py` for production and training: another app class, `app.model`, and a function for rollouts."""

import asyncio
import os

import mini_swe  # noqa: F401  (loaded once, before sessions begin)
from agents import Connection
from payload import HarborRequest
from trial import run_trial

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@app.entrypoint
async def invoke_agent(payload):
    request = HarborRequest.of(payload)
    model = app.model(default=os.environ.get("MODEL_ID"))
    key = {} if model.base_url is None else {"api_key": model.api_key}
    params = {"max_tokens": 4096, **model.sampling_params}
    connection = Connection(model_id=model.model_id, base_url=model.base_url, params=params, **key)
    return await asyncio.to_thread(run_trial, request, request.load(), connection)


@app.rollout_entrypoint(on_policy_failure=0.0)
async def rollout(payload):
    return await invoke_agent(payload)


if __name__ == "__main__":
    app.run()

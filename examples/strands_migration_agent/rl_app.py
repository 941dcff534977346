"""The agent of `basic_app.py` for production and training: another app class, `app.model`, and a function for rollouts."""

import asyncio
import os

from payload import SYSTEM_PROMPT, MigrationRequest
from reward import expected_tests, score
from strands import Agent
from workspace_tools import Workspace, make_tools

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

app = AgentCoreRLApp()


async def migrate(request, project, workspace):
    model = app.model(default=os.environ.get("MODEL_ID")).strands_model(max_tokens=4096)
    agent = Agent(model=model, tools=make_tools(workspace), system_prompt=SYSTEM_PROMPT, callback_handler=None)
    question = request.question(project, expected_tests(project).total())
    return await agent.invoke_async(question, limits={"turns": request.max_turns})


@app.entrypoint
async def invoke_agent(payload):
    request = MigrationRequest.of(payload)
    project = await asyncio.to_thread(request.load)
    with Workspace(project) as workspace:
        response = await migrate(request, project, workspace)
        judged = await asyncio.to_thread(score, project, workspace.tree)
        patch = await asyncio.to_thread(workspace.patch)
    return {"answer": str(response), "migrated": judged.reward == 1.0, "findings": judged.findings, "patch": patch}


@app.rollout_entrypoint(on_policy_failure=0.0)
async def rollout(payload):
    request = MigrationRequest.of(payload)
    project = await asyncio.to_thread(request.load)
    with Workspace(project) as workspace:
        response = await migrate(request, project, workspace)
        PolicyFailure.check_stop(response.stop_reason)  # out of turns
        judged = await asyncio.to_thread(score, project, workspace.tree)
    return {"rewards": judged.reward, "metrics": judged.metrics(), "findings": judged.findings}


if __name__ == "__main__":
    app.run()

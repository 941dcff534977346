"""The agent of `basic_app.py` for production and training: another app class, `app.model`, and a function for rollouts."""

import asyncio

from officebench.request import TaskRequest
from officebench.tasks import load_task
from officebench.tools import MAX_TOKENS, MAX_TURNS, office_tools, system_prompt
from officebench.workspace import new_workspace
from reward import OfficeReward
from strands import Agent

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

app = AgentCoreRLApp()
reward = OfficeReward()


async def work(request, task, workspace):
    model = app.model(default="us.anthropic.claude-sonnet-4-20250514-v1:0").strands_model(max_tokens=MAX_TOKENS)
    agent = Agent(model=model, tools=office_tools(workspace), system_prompt=system_prompt(task), callback_handler=None)
    return agent, await agent.invoke_async(request.prompt or task.text, limits={"turns": MAX_TURNS})


@app.entrypoint
async def invoke_agent(payload):
    request = TaskRequest.of(payload)
    task = load_task(request.task_id)
    with new_workspace(task.testbed) as workspace:
        _, response = await work(request, task, workspace)
    return {"answer": str(response)}


@app.rollout_entrypoint(on_policy_failure=0.0)
async def rollout(payload):
    request = TaskRequest.of(payload)
    task = load_task(request.task_id)
    with new_workspace(task.testbed) as workspace:
        agent, response = await work(request, task, workspace)
        PolicyFailure.check_stop(response.stop_reason)  # out of turns
        verdict = await asyncio.to_thread(reward.explain, task=task, workspace=workspace)
    tool_calls = sum("toolUse" in block for message in agent.messages for block in message["content"])
    return {
        "rewards": verdict["reward"],
        "reasons": verdict["reasons"],
        "metrics": {"published": verdict["published"], "tool_calls": tool_calls, "level": task.level},
    }


if __name__ == "__main__":
    app.run()

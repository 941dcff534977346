"""The agent of `basic_app.py` for production and training: another app class, `app.model`, and a function for rollouts."""

from appworld_http.request import MAX_TOKENS, MAX_TURNS, TaskRequest, system_prompt
from appworld_http.server import installation, running_server
from appworld_http.world import World
from reward import AppWorldReward
from strands import Agent, tool

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

app = AgentCoreRLApp()
reward = AppWorldReward()


def work_in(world):
    model = app.model(default="us.anthropic.claude-sonnet-4-20250514-v1:0").strands_model(max_tokens=MAX_TOKENS)

    @tool
    def execute(code: str) -> str:
        """Run Python code in the world and see what it prints.

        Args:
            code: The code
        """
        return world.execute(code)

    agent = Agent(model=model, tools=[execute], system_prompt=system_prompt(world.task), callback_handler=None)
    return agent, agent(world.task.instruction, limits={"turns": MAX_TURNS})


@app.entrypoint
def invoke_agent(payload):
    request = TaskRequest.of(payload)
    with running_server(*installation()) as url, World(url, request.task_id) as world:
        _, response = work_in(world)
        return {"answer": str(response), "complete": world.is_complete()}


@app.rollout_entrypoint(on_policy_failure=0.0)
def rollout(payload):
    request = TaskRequest.of(payload)
    with running_server(*installation()) as url, World(url, request.task_id) as world:
        agent, response = work_in(world)
        PolicyFailure.check_stop(response.stop_reason)  # out of turns
        evaluation, complete = world.evaluate(), world.is_complete()
    tool_calls = sum("toolUse" in block for message in agent.messages for block in message["content"])
    return {
        "rewards": reward(evaluation=evaluation),
        "failures": [test["requirement"] for test in evaluation.failures],
        "metrics": {
            "tool_calls": tool_calls,
            "complete": float(complete),
            "tests_passed": len(evaluation.passes),
            "tests": evaluation.num_tests,
        },
    }


if __name__ == "__main__":
    app.run()

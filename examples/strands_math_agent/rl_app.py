"""The agent of `basic_app.py` for production and training: another app class, `app.model`, and a function for rollouts."""

from reward import AnswerReward
from strands import Agent, tool
from word_problems import MAX_TOKENS, MAX_TURNS, SYSTEM_PROMPT, Problem, calculator

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

app = AgentCoreRLApp()
reward = AnswerReward()


@app.entrypoint
async def invoke_agent(payload):
    problem = Problem.of(payload)
    model = app.model(default="us.anthropic.claude-sonnet-4-20250514-v1:0").strands_model(max_tokens=MAX_TOKENS)
    agent = Agent(model=model, tools=[tool(calculator)], system_prompt=SYSTEM_PROMPT, callback_handler=None)
    response = await agent.invoke_async(problem.prompt, limits={"turns": MAX_TURNS})
    return {"answer": str(response), "stop_reason": response.stop_reason}


@app.rollout_entrypoint(on_policy_failure=0.0)
async def rollout(payload):
    result = await invoke_agent(payload)
    PolicyFailure.check_stop(result["stop_reason"])  # out of turns
    return {"rewards": reward(response_text=result["answer"], answer=payload["answer"])}


if __name__ == "__main__":
    app.run()

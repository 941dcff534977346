"""An agent in Strands. What makes it trainable: the app, its model, and the second function, which returns a reward."""

from reward import AnswerReward
from strands import Agent, tool
from tools import SYSTEM_PROMPT, calculator

from agentcore_rl_toolkit import AgentCoreRLApp

HOSTED = "us.anthropic.claude-sonnet-4-20250514-v1:0"  # a model on Bedrock, which serves production until a trained model does
app = AgentCoreRLApp()
reward = AnswerReward()


@app.entrypoint
async def invoke_agent(payload):
    model = app.model(default=HOSTED).strands_model(max_tokens=64, temperature=1.0)
    agent = Agent(model=model, tools=[tool(calculator)], system_prompt=SYSTEM_PROMPT, callback_handler=None)
    return {"answer": str(await agent.invoke_async(payload["prompt"]))}


@app.rollout_entrypoint(on_policy_failure=0.0)  # out of tokens, turns or context: a reward like any other
async def rollout(payload):
    result = await invoke_agent(payload)
    return {"rewards": reward(response_text=result["answer"], answer=payload["answer"])}


if __name__ == "__main__":
    app.run()

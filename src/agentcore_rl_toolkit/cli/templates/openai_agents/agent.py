"""An agent with OpenAI's Agents SDK. What makes it trainable: the app, its model, and the second function with a reward."""

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from reward import AnswerReward
from tools import SYSTEM_PROMPT, calculator

from agentcore_rl_toolkit import AgentCoreRLApp

HOSTED = "openai.gpt-oss-120b-1:0"  # a model on Bedrock, which serves production until a trained model does
set_tracing_disabled(True)  # its traces would go to OpenAI
app = AgentCoreRLApp()
reward = AnswerReward()


@app.entrypoint
async def invoke_agent(payload):
    given = app.model(default=HOSTED)
    async with AsyncOpenAI(**given.openai_kwargs()) as client:
        agent = Agent(
            name="stock",
            instructions=SYSTEM_PROMPT,
            tools=[function_tool(calculator)],
            model=OpenAIChatCompletionsModel(model=given.model_id, openai_client=client),
            model_settings=ModelSettings(max_tokens=64, temperature=1.0),
        )
        result = await Runner.run(agent, payload["prompt"])
    return {"answer": str(result.final_output)}


@app.rollout_entrypoint(on_policy_failure=0.0)  # out of turns, a call of an unknown tool: a reward like any other
async def rollout(payload):
    result = await invoke_agent(payload)
    return {"rewards": reward(response_text=result["answer"], answer=payload["answer"])}


if __name__ == "__main__":
    app.run()

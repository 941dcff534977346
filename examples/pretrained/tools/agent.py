"""The agent of a shop with two tools: one returns a price, the other multiplies."""

from openai import AsyncOpenAI
from shop import SYSTEM_PROMPT, answered, multiply, price_list
from strands import Agent
from strands.models.openai import OpenAIModel

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@app.rollout_entrypoint(on_policy_failure=0.0)
async def invoke_agent(payload):
    rollout = payload["_rollout"]
    async with AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout.get("api_key", "none")) as client:
        model = OpenAIModel(
            client=client,
            model_id=rollout["model_id"],
            params={"max_tokens": 48, **rollout.get("sampling_params", {})},
            stream=False,
        )
        tools = [price_list(payload["prices"]), multiply]
        agent = Agent(model=model, tools=tools, system_prompt=SYSTEM_PROMPT, callback_handler=None)
        response = await agent.invoke_async(payload["prompt"])
    calls = sum("toolUse" in block for message in agent.messages for block in message["content"])
    return {"rewards": answered(str(response), payload["answer"]), "metrics": {"tool_calls": calls}}


if __name__ == "__main__":
    app.run()

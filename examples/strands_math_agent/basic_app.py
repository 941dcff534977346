"""A math agent as you would deploy it to Bedrock AgentCore Runtime. `rl_app.py` is the same agent made trainable."""

import os

from bedrock_agentcore.runtime import BedrockAgentCoreApp
from math_tools import SYSTEM_PROMPT, calculator
from strands import Agent
from strands.models.openai import OpenAIModel

app = BedrockAgentCoreApp()


@app.entrypoint
async def invoke_agent(payload):
    model = OpenAIModel(
        client_args={"base_url": os.environ["MODEL_BASE_URL"], "api_key": os.environ["MODEL_API_KEY"]},
        model_id=os.environ["MODEL_ID"],
        params={"max_tokens": 64, "temperature": 1.0},
    )
    agent = Agent(model=model, tools=[calculator], system_prompt=SYSTEM_PROMPT, callback_handler=None)
    response = await agent.invoke_async(payload["prompt"])
    return {"answer": str(response)}


if __name__ == "__main__":
    app.run()

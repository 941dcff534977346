"""The agent of the quickstart: word problems, with the prompt and the calculator that the built-in policy knows."""

import httpx
from math_tools import SYSTEM_PROMPT, AnswerReward, calculator
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from strands import Agent
from strands.models.openai import OpenAIModel

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()
reward = AnswerReward()
# Reading the certificates takes 60 ms of CPU. Local sessions fork after this import and share what was read.
TLS = httpx.create_ssl_context()


@app.entrypoint
async def invoke_agent(payload):
    given = app.model(default="openai.gpt-oss-120b-1:0")
    # One client for all calls of a rollout, and no streaming: this saves a fifth of the agent's CPU time.
    async with AsyncOpenAI(**given.openai_kwargs(), http_client=DefaultAsyncHttpxClient(verify=TLS)) as client:
        model = OpenAIModel(
            client=client,
            model_id=given.model_id,
            params={"max_tokens": 64, "temperature": 1.0, **given.sampling_params},
            stream=False,
        )
        agent = Agent(model=model, tools=[calculator], system_prompt=SYSTEM_PROMPT, callback_handler=None)
        response = await agent.invoke_async(payload["prompt"])
    tool_calls = sum("toolUse" in block for message in agent.messages for block in message["content"])
    return {"answer": str(response), "tool_calls": tool_calls}


@app.rollout_entrypoint
async def rollout(payload):
    result = await invoke_agent(payload)
    return {
        "rewards": reward(response_text=result["answer"], answer=payload["answer"]),
        "metrics": {"tool_calls": result["tool_calls"]},
    }


if __name__ == "__main__":
    app.run()

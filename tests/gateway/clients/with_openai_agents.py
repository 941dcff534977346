"""An agent of the OpenAI Agents SDK: python with_openai_agents.py CASES."""

import asyncio
import json
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI

added: list[list[int]] = []


@function_tool
def add(x: int, y: int) -> int:
    """Add two numbers."""
    added.append([x, y])
    return x + y


async def run(url: str, key: str, dialect: str, mode: str) -> None:
    added.clear()
    client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
    kind = OpenAIResponsesModel if dialect == "responses" else OpenAIChatCompletionsModel
    agent = Agent(
        name="adder",
        instructions="be brief",
        tools=[add],
        model=kind(model="m", openai_client=client),
        model_settings=ModelSettings(max_tokens=64, parallel_tool_calls=True),
    )
    question, pieces = "what is 2 + 3, and 4 + 5", 0
    if mode == "stream":
        running = Runner.run_streamed(agent, question)
        async for event in running.stream_events():
            pieces += event.type == "raw_response_event"
        final = running.final_output
    else:
        final = (await Runner.run(agent, question)).final_output
    print(json.dumps({"text": final.strip(), "added": sorted(added), "pieces": pieces}))


for case in json.loads(sys.argv[1]):
    asyncio.run(run(*case))

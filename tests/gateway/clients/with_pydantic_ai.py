"""An agent of Pydantic AI with BedrockConverseModel: python with_pydantic_ai.py CASES."""

import asyncio
import json
import os
import sys

from pydantic_ai import Agent, AgentRunResultEvent

added: list[list[int]] = []
os.environ |= {"AWS_ACCESS_KEY_ID": "agent", "AWS_SECRET_ACCESS_KEY": "unused", "AWS_DEFAULT_REGION": "us-west-2"}


def add(x: int, y: int) -> int:
    """Add two numbers."""
    added.append([x, y])
    return x + y


async def talk(mode: str) -> None:
    model = "bedrock:us.anthropic.claude-sonnet-4-5-20250929-v1:0"
    agent = Agent(model, instructions="be brief", tools=[add])
    question, pieces = "what is 2 + 3, and 4 + 5", 0
    if mode == "stream":
        async with agent.run_stream_events(question) as events:
            async for event in events:
                pieces += 1
                if isinstance(event, AgentRunResultEvent):
                    text = event.result.output
    else:
        text = (await agent.run(question)).output
    print(json.dumps({"text": text.strip(), "added": sorted(added), "pieces": pieces}))


for url, key, _, mode in json.loads(sys.argv[1]):
    added.clear()
    os.environ["AWS_ENDPOINT_URL_BEDROCK_RUNTIME"] = f"{url}/bedrock/{key}"
    asyncio.run(talk(mode))

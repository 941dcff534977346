"""A LangGraph agent with ChatBedrockConverse: python with_langchain_aws.py CASES."""

import json
import os
import sys

from langchain.agents import create_agent
from langchain_aws import ChatBedrockConverse
from langchain_core.tools import tool

added: list[list[int]] = []
os.environ |= {"AWS_ACCESS_KEY_ID": "agent", "AWS_SECRET_ACCESS_KEY": "unused", "AWS_REGION": "us-west-2"}


@tool
def add(x: int, y: int) -> int:
    """Add two numbers."""
    added.append([x, y])
    return x + y


for url, key, _, mode in json.loads(sys.argv[1]):
    added.clear()
    os.environ["AWS_ENDPOINT_URL_BEDROCK_RUNTIME"] = f"{url}/bedrock/{key}"
    model = ChatBedrockConverse(model="us.anthropic.claude-sonnet-4-5-20250929-v1:0", region_name="us-west-2")
    agent = create_agent(model, tools=[add], system_prompt="be brief")
    question = {"messages": [("user", "what is 2 + 3, and 4 + 5")]}
    final, pieces = "", 0
    if mode == "stream":
        for chunk, about in agent.stream(question, stream_mode="messages"):
            pieces += 1
            final += chunk.text if about["langgraph_node"] == "model" else ""
    else:
        final = agent.invoke(question)["messages"][-1].text
    print(json.dumps({"text": final.strip(), "added": sorted(added), "pieces": pieces}))

"""LangChain with Amazon Bedrock's Converse API."""

import os

from langchain.agents import create_agent
from langchain_aws import ChatBedrockConverse
from langchain_core.tools import tool


@tool
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


@tool
def multiply(x: int, y: int) -> int:
    """Multiply two numbers."""
    return x * y


model = ChatBedrockConverse(model="us.anthropic.claude-sonnet-4-5-20250929-v1:0")
agent = create_agent(model, tools=[add, multiply], system_prompt="Use the tools.")
print(agent.invoke({"messages": [("user", os.environ["TASK"])]})["messages"][-1].text)

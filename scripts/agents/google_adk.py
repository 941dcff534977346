"""Google ADK, which speaks the Gemini API."""

import asyncio
import os

from google.adk.agents import LlmAgent
from google.adk.runners import InMemoryRunner


def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


def multiply(x: int, y: int) -> int:
    """Multiply two numbers."""
    return x * y


agent = LlmAgent(name="calculator", model="gemini-2.5-flash", instruction="Use the tools.", tools=[add, multiply])
events = asyncio.run(InMemoryRunner(agent=agent).run_debug(os.environ["TASK"], quiet=True))
print("".join(part.text or "" for part in events[-1].content.parts))

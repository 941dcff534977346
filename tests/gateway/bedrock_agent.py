"""A Strands agent that knows nothing of the gateway: its model comes from the environment alone."""

import json

from strands import Agent, tool
from strands.models.bedrock import BedrockModel


@tool
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


def entrypoint() -> str:
    agent = Agent(model=BedrockModel(), tools=[add], system_prompt="be brief", callback_handler=None)
    return str(agent("what is 1 + 3")).strip()


if __name__ == "__main__":
    print(json.dumps(entrypoint()))

"""An agent of Google ADK: python with_google_adk.py CASES."""

import asyncio
import json
import os
import sys

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.runners import InMemoryRunner
from google.genai import types


async def talk(url: str, key: str, mode: str) -> None:
    os.environ |= {"GOOGLE_GEMINI_BASE_URL": url, "GOOGLE_API_KEY": key}
    added = []

    def add(x: int, y: int) -> int:
        """Add two numbers."""
        added.append([x, y])
        return x + y

    agent = LlmAgent(name="adder", model="gemini-2.5-flash", instruction="Use the tool.", tools=[add])
    runner = InMemoryRunner(agent=agent, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="u")
    text, pieces = "", 0
    config = RunConfig(streaming_mode=StreamingMode.SSE if mode == "stream" else StreamingMode.NONE)
    asked = types.Content(role="user", parts=[types.Part(text="Add.")])
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=asked, run_config=config):
        pieces += 1
        if event.is_final_response() and event.content:
            text = "".join(part.text or "" for part in event.content.parts or [] if not part.thought)
    print(json.dumps({"text": text, "added": added, "pieces": pieces}))


async def main() -> None:
    for url, key, _, mode in json.loads(sys.argv[1]):
        await talk(url, key, mode)


asyncio.run(main())

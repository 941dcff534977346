"""The math agent, except that the first session to create a marker file raises: an injected failure for end-to-end tests."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "strands_math_agent"))

from math_tools import SYSTEM_PROMPT, AnswerReward, calculator
from strands import Agent
from strands.models.openai import OpenAIModel

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@app.rollout_entrypoint
async def invoke_agent(payload):
    try:
        os.close(os.open(payload["fail_marker"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        rollout = payload["_rollout"]
        model = OpenAIModel(
            client_args={"base_url": rollout["base_url"], "api_key": rollout["api_key"]},
            model_id=rollout["model_id"],
            params={"max_tokens": 64, "temperature": 1.0, **rollout.get("sampling_params", {})},
        )
        agent = Agent(model=model, tools=[calculator], system_prompt=SYSTEM_PROMPT, callback_handler=None)
        response = await agent.invoke_async(payload["prompt"])
        return {"rewards": AnswerReward()(response_text=str(response), answer=payload["answer"])}
    raise RuntimeError("injected failure")


if __name__ == "__main__":
    app.run()

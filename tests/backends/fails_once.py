"""The math agent, except that the first session to finish raises instead of returning: an injected failure."""

import os

from math_tools import SYSTEM_PROMPT, AnswerReward, calculator
from strands import Agent
from strands.models.openai import OpenAIModel

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@app.rollout_entrypoint
async def invoke_agent(payload):
    rollout = payload["_rollout"]
    model = OpenAIModel(
        client_args={"base_url": rollout["base_url"], "api_key": rollout.get("api_key", "none")},
        model_id=rollout["model_id"],
        params={"max_tokens": 64, "temperature": 1.0, **rollout.get("sampling_params", {})},
    )
    agent = Agent(model=model, tools=[calculator], system_prompt=SYSTEM_PROMPT, callback_handler=None)
    response = await agent.invoke_async(payload["prompt"])
    try:
        os.close(os.open(payload["fail_marker"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return {"rewards": AnswerReward()(response_text=str(response), answer=payload["answer"])}
    raise RuntimeError("injected failure")  # after its turns: what they sampled must not be trained on either


if __name__ == "__main__":
    app.run()

"""An agent without tools: one question, one answer. An example of the task stands before the question, as an earlier turn."""

import json

from openai import AsyncOpenAI
from tasks import score

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

app = AgentCoreRLApp()
MAX_TOKENS = 48


@app.rollout_entrypoint(on_policy_failure=0.0)
async def invoke_agent(payload):
    rollout = payload["_rollout"]
    shown = payload["example"]
    messages = [
        {"role": "user", "content": shown["prompt"]},
        {"role": "assistant", "content": json.dumps(shown["answer"])},
        {"role": "user", "content": payload["prompt"]},
    ]
    async with AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout.get("api_key", "none")) as client:
        reply = await client.chat.completions.create(
            model=rollout["model_id"],
            messages=messages,
            max_tokens=MAX_TOKENS,
            extra_body=rollout.get("sampling_params"),
        )
    PolicyFailure.check_stop(reply.choices[0].finish_reason)  # out of tokens
    return {"rewards": score(reply.choices[0].message.content or "", payload["answer"])}


if __name__ == "__main__":
    app.run()

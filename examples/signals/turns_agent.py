"""The agent of `agentcore-rl init --framework plain` with a reward for each model call; `run.py` puts it into such a folder.

The first call of the tool gets 0.2 if it returns a number. A reward for each call would pay for useless calls. The last answer
gets 1 if it is right. With `--credit episode`, only the last reward counts.
"""

import json

from openai import AsyncOpenAI
from reward import AnswerReward
from tools import SYSTEM_PROMPT, call_tool

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

TURNS = 6
EXPRESSION = {"type": "string", "description": "Such as 2 + 15"}
PARAMETERS = {"type": "object", "properties": {"expression": EXPRESSION}, "required": ["expression"]}
TOOL = {"name": "calculator", "description": "Work out a sum.", "parameters": PARAMETERS}
app = AgentCoreRLApp()
reward = AnswerReward()


@app.rollout_entrypoint(on_policy_failure=0.0)
async def invoke_agent(payload):
    rollout = payload["_rollout"]
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": payload["prompt"]}]
    rewards: list[float] = []
    async with AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout.get("api_key", "none")) as client:
        for _ in range(TURNS):
            reply = await client.chat.completions.create(
                model=rollout["model_id"],
                messages=messages,
                tools=[{"type": "function", "function": TOOL}],
                max_tokens=64,
                temperature=1.0,
            )
            PolicyFailure.check_stop(reply.choices[0].finish_reason)  # out of tokens
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            results = [run(call.function) for call in message.tool_calls]
            for call, result in zip(message.tool_calls, results, strict=True):
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            rewards.append(0.0 if rewards or results[0].startswith("error") else 0.2)
        else:
            raise PolicyFailure("turns")
    return {"rewards": [*rewards, reward(response_text=message.content or "", answer=payload["answer"])]}


def run(function):
    try:
        arguments = json.loads(function.arguments)
    except ValueError:
        arguments = None
    return call_tool(function.name, arguments)


if __name__ == "__main__":
    app.run()

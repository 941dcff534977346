"""An agent without a framework: OpenAI's client and a loop."""

import json

from openai import AsyncOpenAI
from reward import AnswerReward
from tools import SYSTEM_PROMPT, call_tool

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

HOSTED = "openai.gpt-oss-120b-1:0"  # a model on Bedrock, which serves production until a trained model does
TURNS = 6
EXPRESSION = {"type": "string", "description": "Such as 2 + 15"}
PARAMETERS = {"type": "object", "properties": {"expression": EXPRESSION}, "required": ["expression"]}
TOOLS = [
    {"type": "function", "function": {"name": "calculator", "description": "Work out a sum.", "parameters": PARAMETERS}}
]
app = AgentCoreRLApp()
reward = AnswerReward()


@app.entrypoint
async def invoke_agent(payload):
    model = app.model(default=HOSTED)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": payload["prompt"]}]
    async with AsyncOpenAI(**model.openai_kwargs()) as client:
        for _ in range(TURNS):
            reply = await client.chat.completions.create(
                model=model.model_id, messages=messages, tools=TOOLS, max_tokens=64, temperature=1.0
            )
            PolicyFailure.check_stop(reply.choices[0].finish_reason)  # out of tokens
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                try:
                    arguments = json.loads(call.function.arguments)
                except ValueError:
                    arguments = None
                result = call_tool(call.function.name, arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                return {"answer": message.content or ""}
    raise PolicyFailure("turns")


@app.rollout_entrypoint(on_policy_failure=0.0)
async def rollout(payload):
    result = await invoke_agent(payload)
    return {"rewards": reward(response_text=result["answer"], answer=payload["answer"])}


if __name__ == "__main__":
    app.run()

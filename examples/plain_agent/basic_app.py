"""A math agent without a framework as you deploy it to Bedrock AgentCore Runtime. `rl_app.py` is the same agent made trainable.

Bedrock serves OpenAI's open-weight models behind OpenAI's own API; AWS_BEARER_TOKEN_BEDROCK is a Bedrock API key.
"""

import os

from bedrock_agentcore.runtime import BedrockAgentCoreApp
from openai import AsyncOpenAI
from word_problems import MAX_TOKENS, MAX_TURNS, SYSTEM_PROMPT, TOOL, Problem, call_tool, parsed

BEDROCK = "https://bedrock-runtime.us-west-2.amazonaws.com/openai/v1"
app = BedrockAgentCoreApp()


@app.entrypoint
async def invoke_agent(payload):
    problem = Problem.of(payload)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem.prompt}]
    async with AsyncOpenAI(base_url=BEDROCK, api_key=os.environ["AWS_BEARER_TOKEN_BEDROCK"]) as client:
        for _ in range(MAX_TURNS):
            reply = await client.chat.completions.create(
                model="openai.gpt-oss-120b-1:0",
                messages=messages,
                tools=[{"type": "function", "function": TOOL}],
                max_tokens=MAX_TOKENS,
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                result = call_tool(call.function.name, parsed(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break
    return {"answer": message.content or "", "stop_reason": reply.choices[0].finish_reason}


if __name__ == "__main__":
    app.run()

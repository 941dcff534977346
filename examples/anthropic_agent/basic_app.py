"""A math agent on Anthropic's Messages API as you deploy it. `rl_app.py` is the same agent made trainable."""

from anthropic import AsyncAnthropicBedrock
from bedrock_agentcore.runtime import BedrockAgentCoreApp
from word_problems import MAX_TOKENS, MAX_TURNS, SYSTEM_PROMPT, TOOL, Problem, call_tool

TOOLS = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
app = BedrockAgentCoreApp()


@app.entrypoint
async def invoke_agent(payload):
    problem = Problem.of(payload)
    messages = [{"role": "user", "content": problem.prompt}]
    async with AsyncAnthropicBedrock() as client:
        for _ in range(MAX_TURNS):
            reply = await client.messages.create(
                model="us.anthropic.claude-sonnet-4-20250514-v1:0",
                system=SYSTEM_PROMPT,
                messages=messages,
                tools=TOOLS,
                max_tokens=MAX_TOKENS,
            )
            messages.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                break
            results = [(call.id, call_tool(call.name, call.input)) for call in calls]
            blocks = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in results]
            messages.append({"role": "user", "content": blocks})
    text = "".join(block.text for block in reply.content if block.type == "text")
    return {"answer": text, "stop_reason": reply.stop_reason}


if __name__ == "__main__":
    app.run()

"""A tool loop over LiteLLM: python with_litellm.py CASES."""

import json
import sys

import litellm

parameters = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
}
tools = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": parameters}}]
for url, key, dialect, mode in json.loads(sys.argv[1]):
    if dialect == "anthropic":
        model, base = "anthropic/m", url.removesuffix("/v1")
    else:
        model, base = "openai/m", url
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is 2 + 3, and 4 + 5"}]
    added, pieces = [], 0
    for _ in range(4):
        reply = litellm.completion(
            model=model,
            api_base=base,
            api_key=key,
            messages=messages,
            tools=tools,
            max_tokens=64,
            stream=mode == "stream",
            num_retries=0,
        )
        if mode == "stream":
            chunks = list(reply)
            pieces += len(chunks)
            reply = litellm.stream_chunk_builder(chunks, messages=messages)
        message = reply.choices[0].message
        # Not "": on its way to Anthropic, LiteLLM fills an empty text with a sentence of its own, which rewrites history.
        messages.append({**message.model_dump(exclude_none=True), "content": message.content or None})
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            asked = json.loads(call.function.arguments)
            added.append([asked["x"], asked["y"]])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(asked["x"] + asked["y"])})
    print(json.dumps({"text": (message.content or "").strip(), "added": sorted(added), "pieces": pieces}))

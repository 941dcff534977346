"""An agent of the published toolkit (0.2.0) that asks the model once; run in that toolkit's environment on port PORT."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from typing import Any

from agentcore_rl_toolkit.runtime import AgentCoreRuntimeApp

app = AgentCoreRuntimeApp()


def ask(config: dict[str, str], prompt: str) -> str:
    body = {"model": config["model_id"], "messages": [{"role": "user", "content": prompt}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {config['api_key']}"}
    request = urllib.request.Request(f"{config['base_url']}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


@app.entrypoint
async def run(payload: dict[str, Any]) -> dict[str, float]:
    text = await asyncio.to_thread(ask, payload["_config"], payload["prompt"])
    return {"reward": float(len(text) % 2)}


if __name__ == "__main__":
    app.run(port=int(sys.argv[1]), host="127.0.0.1")

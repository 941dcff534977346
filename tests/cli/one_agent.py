"""An agent that asks its model once, and knows nothing of trainers."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@app.rollout_entrypoint
def run(payload: dict[str, Any]) -> dict[str, float]:
    rollout = payload["_rollout"]
    ask = {"model": rollout["model_id"], "messages": [{"role": "user", "content": payload["prompt"]}]}
    headers = {"authorization": f"Bearer {rollout['api_key']}", "content-type": "application/json"}
    call = urllib.request.Request(f"{rollout['base_url']}/chat/completions", json.dumps(ask).encode(), headers)
    with urllib.request.urlopen(call) as reply:
        said = json.load(reply)["choices"][0]["message"]["content"] or ""
    return {"rewards": len(said) % 2}


if __name__ == "__main__":
    app.run()

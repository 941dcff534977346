"""The scripted model as a process: `python model.py PORT READY_FILE PARENT_PID`. It answers by task and turn only."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from agentcore_rl_toolkit.gateway.testing import ScriptedEngine, Seen
from soak_load.words import text_of

REMEMBERED = 64


def decide(seen: Seen) -> dict[str, Any]:
    """The reply to a call, by its task and turn."""
    messages = seen.body["messages"]
    task = messages[0]["content"].removeprefix("task ")
    turn = sum(message["role"] == "user" for message in messages) - 1
    return {"content": text_of(task, turn)}


async def main(port: int, ready: Path, parent: int) -> None:
    model = ScriptedEngine(token_s=0.001, decide=decide)
    await model.start(port)
    written = ready.with_suffix(".part")
    written.write_text(json.dumps({"url": model.url, "pid": os.getpid()}))
    written.rename(ready)
    while os.getppid() == parent:  # another process has no event
        del model.requests[:-REMEMBERED]
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))

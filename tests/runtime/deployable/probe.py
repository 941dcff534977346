# ruff: noqa: ASYNC221, ASYNC230
"""An agent whose payload says what it should do. Used by the tests of the local runtime."""

import asyncio
import os
import random
import socket
import subprocess
import time
import uuid

from bedrock_agentcore.runtime import BedrockAgentCoreApp

app = BedrockAgentCoreApp()
LOADED = uuid.uuid4().hex  # differs with every run of this module
calls = 0


async def background(seconds, task):
    await asyncio.sleep(seconds)
    app.complete_async_task(task)


@app.entrypoint
async def main(payload, context):
    global calls
    calls += 1
    what = payload.get("do", "echo")
    if what == "echo":
        return {
            "echo": payload,
            "pid": os.getpid(),
            "loaded": LOADED,
            "calls": calls,
            "session": context.session_id,
        }
    if what == "headers":
        return {"headers": dict(context.request_headers or {})}
    if what == "stream":
        return stream(payload["n"], payload.get("delay_s", 0.0), payload.get("size", 1))
    if what == "raise":
        raise ValueError("this agent fails on purpose")
    if what == "sleep":
        if "say" in payload:  # into its log, for who has to know that it has begun
            print(payload["say"], flush=True)
        await asyncio.sleep(payload["s"])
        return {"slept": payload["s"], "calls": calls}
    if what == "busy":
        asyncio.get_running_loop().create_task(background(payload["s"], app.add_async_task("work")))
        return {"status": "processing"}
    if what == "die":
        os._exit(7)
    if what == "where":
        with open("note", "w") as f:
            f.write("mine")
        return {
            "cwd": os.getcwd(),
            "files": sorted(os.listdir()),
            "tmp": __import__("tempfile").gettempdir(),
            "home": os.environ["HOME"],
            "env": dict(os.environ),
            "random": random.random(),
            "host": socket.gethostname(),
        }
    if what == "read":
        try:
            with open(payload["path"]) as f:
                return {"read": f.read()[:100]}
        except OSError as e:
            return {"error": type(e).__name__}
    if what == "spawn":
        # a daemon: in a session of its own, and its parent is gone
        text = "sleep 600 >/dev/null 2>&1 & echo $!"
        started = subprocess.run(["/bin/sh", "-c", text], start_new_session=True, capture_output=True, check=True)
        return {"child": int(started.stdout)}
    if what == "print":
        print(payload["text"] * payload.get("times", 1))
        return {}
    if what == "size":
        return {"bytes": len(payload["data"])}
    if what == "spin":
        end = time.monotonic() + payload["s"]
        while time.monotonic() < end:
            pass
        return {}
    raise KeyError(what)


async def stream(n, delay_s, size):
    for i in range(n):
        yield {"i": i, "pad": "x" * size}
        await asyncio.sleep(delay_s)


if __name__ == "__main__":
    app.run()

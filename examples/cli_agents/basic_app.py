"""Coding agents as you deploy them to Bedrock AgentCore Runtime. `rl_app.py` is the same agent made trainable.

MODEL_URL, MODEL_KEY and MODEL_ID name a server with the API that the program speaks.
"""

import os
import tempfile
from pathlib import Path

from bedrock_agentcore.runtime import BedrockAgentCoreApp
from programs import Connection, run_program
from task import Task

app = BedrockAgentCoreApp()


@app.entrypoint
async def invoke_agent(payload):
    task = Task.of(payload)
    model = Connection(
        base_url=os.environ["MODEL_URL"], api_key=os.environ["MODEL_KEY"], model_id=os.environ["MODEL_ID"]
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        workspace, home = Path(folder, "workspace"), Path(folder, "home")
        task.lay_out(workspace, home)
        output = await run_program(task.program, task.prompt, workspace, home, model, task.limit_s)
        return {"output": output, "files": task.read_back(workspace)}


if __name__ == "__main__":
    app.run()

"""The agent of `basic_app.py` for production and training: another app class, `app.model`, and a function for rollouts."""

import os
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

from programs import Connection, ProgramError, run_program
from reward import reward
from task import Task

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

app = AgentCoreRLApp()


@asynccontextmanager
async def worked_on(task):
    names = {"base_url": "MODEL_URL", "api_key": "MODEL_KEY", "model_id": "MODEL_ID"}
    given = app.model(default={field: os.environ.get(name) for field, name in names.items()})
    model = Connection(base_url=given.base_url, api_key=given.api_key, model_id=given.model_id)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        workspace, home = Path(folder, "workspace"), Path(folder, "home")
        task.lay_out(workspace, home)
        yield workspace, await run_program(task.program, task.prompt, workspace, home, model, task.limit_s)


@app.entrypoint
async def invoke_agent(payload):
    task = Task.of(payload)
    async with worked_on(task) as (workspace, output):
        return {"output": output, "files": task.read_back(workspace)}


@app.rollout_entrypoint(on_policy_failure=0.0)
async def rollout(payload):
    task = Task.of(payload)
    try:
        async with worked_on(task) as (workspace, output):
            return {"rewards": await reward(workspace, task.check), "output": output}
    except ProgramError as e:
        if e.ran_out_of is None:
            raise
        raise PolicyFailure(e.ran_out_of) from e


if __name__ == "__main__":
    app.run()

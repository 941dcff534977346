"""The agent of `basic_app.py`, made trainable: another app class, another decorator, the rollout's model, a reward."""

import tempfile
from pathlib import Path

from programs import Connection, ProgramError, run_program
from reward import reward
from task import Task

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

app = AgentCoreRLApp()


@app.rollout_entrypoint(on_policy_failure=0.0)
async def invoke_agent(payload):
    task, rollout = Task.of(payload), payload["_rollout"]
    model = Connection(
        base_url=rollout["base_url"], api_key=rollout.get("api_key", "none"), model_id=rollout["model_id"]
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        workspace, home = Path(folder, "workspace"), Path(folder, "home")
        task.lay_out(workspace, home)
        try:
            output = await run_program(task.program, task.prompt, workspace, home, model, task.limit_s)
        except ProgramError as e:
            if e.ran_out_of is None:
                raise
            raise PolicyFailure(e.ran_out_of) from e
        return {"rewards": await reward(workspace, task.check), "output": output}


if __name__ == "__main__":
    app.run()

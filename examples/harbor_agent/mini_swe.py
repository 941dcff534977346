"""mini-swe-agent on a sandbox: its agent, its prompts (`config/mini.yaml`) and its LiteLLM model; the environment is ours."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Mapping
from typing import Any

# Read at import. A session may have no writable home, and LiteLLM fetches its price list unless told not to.
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", tempfile.gettempdir())
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import yaml
from agents import COMMAND_LIMIT_S, Connection, Ended, Limits
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.exceptions import Submitted
from minisweagent.models.litellm_model import LitellmModel
from sandboxes import Sandbox


def run(instruction: str, sandbox: Sandbox, connection: Connection, limits: Limits) -> Ended:
    """mini-swe-agent with its own prompts (`config/mini.yaml`), its LiteLLM model and our sandbox as its environment."""
    settings = yaml.safe_load((package_dir / "config" / "mini.yaml").read_text())
    where = {"api_base": connection.base_url, "api_key": connection.api_key} if connection.base_url else {}
    model = LitellmModel(
        model_name=f"{'openai' if connection.base_url else 'bedrock'}/{connection.model_id}",
        model_kwargs={**where, **connection.params},
        cost_tracking="ignore_errors",
        **{k: v for k, v in settings.get("model", {}).items() if k.endswith("_template")},
    )
    templates = {k: v for k, v in settings["agent"].items() if k.endswith("_template")}
    agent = DefaultAgent(
        model,
        SandboxEnvironment(sandbox),
        **templates,
        step_limit=limits.steps,
        cost_limit=0.0,
        wall_time_limit_seconds=max(1, int(limits.limit_s)),
    )
    end = agent.run(instruction)
    return Ended(status=end.get("exit_status", ""), steps=agent.n_calls, said=end.get("submission", ""))


class SandboxEnvironment:
    """A sandbox as mini-swe-agent's `Environment`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.config: dict[str, Any] = {"cwd": sandbox.workdir, "timeout": COMMAND_LIMIT_S}

    def execute(self, action: Mapping[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run one command. Raises: mini-swe-agent's `Submitted` where it says that the task is done."""
        ran = self.sandbox.run(["bash", "-c", action["command"]], limit_s=COMMAND_LIMIT_S)
        first, _, rest = ran.output.lstrip().partition("\n")
        if first.strip() == "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" and ran.code == 0:
            extra = {"exit_status": "Submitted", "submission": rest}
            raise Submitted({"role": "exit", "content": rest, "extra": extra})
        late = "" if ran.code is not None else f"the command was ended after {COMMAND_LIMIT_S:g} s"
        return {"output": ran.output, "returncode": -1 if ran.code is None else ran.code, "exception_info": late}

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        return {**self.config, **platform.uname()._asdict(), **more}

    def serialize(self) -> dict[str, Any]:
        return {"info": {"config": {"environment": self.config}}}

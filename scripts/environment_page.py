"""Write docs/environment.md: the environment variables that the code reads, found in the code.

The page is not written, and the script fails, if a variable has no description here, or a description has no variable.
"""

from __future__ import annotations

import argparse
import ast
import re
from dataclasses import MISSING, fields
from pathlib import Path

from pydantic.fields import FieldInfo

from agentcore_rl_toolkit.app.settings import PREFIX, AgentSettings

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "agentcore_rl_toolkit"
PAGE = ROOT / "docs" / "environment.md"

AGENT = {
    "rollouts": "`on` or `off`: accept rollouts. The default is on, and off next to an `@app.entrypoint` or `@app.websocket`",
    "allowed_buckets": "Buckets or store URLs for records, with commas between; `*` within a name",
    "allowed_base_urls": "Addresses of models that a rollout may use, with commas between; `*` within a part of a host",
    "model_hosts": "More hosts of model APIs, with commas between, for agents that run [as they are](agents.md#model-calls)",
    "policy_models": "Patterns of models that the policy replaces, with commas between, for the same agents",
    "model_url": "Address of the [model](agent.md#the-model) of production calls",
    "model_id": "Name of this model",
    "model_api_key": "Key of this model",
    "heartbeat_s": "Seconds between two heartbeats if the client sets none; 0 for no heartbeat",
    "store_check_s": "Longest time in seconds that a reply waits for the first heartbeat; 0 does not wait",
    "put_timeout_s": "Seconds until an agent gives up a record because the store is unavailable",
    "grace_s": "The same, in seconds, after SIGTERM",
    "max_record_bytes": "Largest record in bytes; a larger result becomes an error record",
    "probe": "Answer the probe of `agentcore-rl doctor --aws`",
    "sagemaker_failures": "`failed` or `zero`: how a [job](backends/sagemaker.md#jobs-the-agents-side) learns about failures",
    "sagemaker_turn_rewards": "Send one reward per model call to the job",
    "sagemaker_background": "Answer the job at once; for rollouts above 15 minutes",
}
PROGRAMS = {
    "AGENTCORE_AGENT_ARN": "Agent of trainers and `doctor`, if no option or file names one",
    "AGENTCORE_S3_BUCKET": "Bucket or store URL of the records, in the same places",
    "AGENTCORE_RL_ALLOWED_HOSTS": "More names of a server, with spaces between, as `--allowed-host`",
    "AGENTCORE_RL_CACHE": "Folder of the environments that are built for agents",
    "AGENTCORE_RL_CREDENTIALS": "Keys that may call `runtime serve`: `KEY:SECRET`, several with spaces between",
    "AGENTCORE_RL_ENGINE_PYTHON": "Python of the environment with vLLM, for `--engine vllm`",
    "AGENTCORE_RL_GATEWAY_ADMIN_KEY": "Admin key of the gateway, for the gateway and for trainers",
    "AGENTCORE_RL_GATEWAY_UPSTREAM_KEY": "Key of the engines, for the gateway",
    "AGENTCORE_RL_GATEWAY_URL": "Gateway of `doctor --aws`",
    "AGENTCORE_RL_JUDGE_KEY": "Key of the judge",
    "AGENTCORE_RL_MODEL_BUCKET": "Bucket of `promote`",
    "AGENTCORE_RL_POLICY_ADMIN_KEY": "Admin key of the policy server: it may replace weights",
    "AGENTCORE_RL_REFLECT_KEY": "Key of the reflection model of `optimize`",
    "AGENTCORE_RL_SERVE_KEY": "Key that clients of `serve` must send, if it listens beyond this machine",
    "AGENTCORE_RL_TEACHER_KEY": "Key of the teacher",
    "AGENTCORE_RL_TEXTS": "File with [the agent's texts](optimize.md); by default `rollout_texts.json` next to the code",
}
# Set by one process of this package for another.
INTERNAL = {"AGENTCORE_RL_AS_IS", "AGENTCORE_RL_SANDBOX", "AGENTCORE_RL_SESSION_ENV"}
OTHERS = {
    "AWS_REGION": "Region, before `AWS_DEFAULT_REGION` and the profile",
    "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": "Another AgentCore, such as the local runtime",
    "AWS_ENDPOINT_URL_S3": "Another S3",
    "AWS_BEARER_TOKEN_BEDROCK": "Token of Amazon Bedrock for `app.model()`",
    "TINKER_API_KEY": "Key of Tinker",
    "TINKER_BASE_URL": "Another address of Tinker",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "Collector for the spans of rollouts ([Traces](operate.md#traces))",
    "OTEL_SERVICE_NAME": "Name of the service in these spans; `agentcore-rl` by default",
    "WANDB_PROJECT": "Project of `--set tracker=wandb`",
    "MLFLOW_TRACKING_URI": "Server of `--set tracker=mlflow`",
    "MLFLOW_EXPERIMENT_NAME": "Experiment of `--set tracker=mlflow`",
    "DOCKER_HOST": "Engine of `--isolation container`; `CONTAINER_HOST` works too",
    "XDG_CACHE_HOME": "Place of caches instead of `~/.cache`",
}
HEAD = """# Environment variables

Programs read these variables when they start, and agents read them at their first request. An empty variable counts as not set.
Put keys into variables, not into options, because other users of a machine can read the options of a program.

`python scripts/environment_page.py` finds the variables in the code and writes this page.
"""


def variables(sources: list[str]) -> set[str]:
    """Return the variables of this project that these modules contain as texts."""
    texts = [n.value for source in sources for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)]
    return {text for text in texts if isinstance(text, str) and re.fullmatch(r"AGENTCORE_[A-Z0-9_]*[A-Z0-9]", text)}


def page() -> str:
    """Return the page. Raises: ValueError if descriptions and variables differ."""
    sources = [file.read_text() for file in SRC.rglob("*.py")]
    settings = {f.name: _default(f.default) for f in fields(AgentSettings)}
    names = {PREFIX + name.upper() for name in settings}
    differ = (variables(sources) - names - INTERNAL) ^ PROGRAMS.keys() | (settings.keys() ^ AGENT.keys())
    differ |= {name for name in OTHERS if not any(f'"{name}"' in source for source in sources)}
    if differ:
        raise ValueError(f"{', '.join(sorted(differ))}: only in the code, or only in the descriptions of this script")
    agent = [f"| `{PREFIX}{name.upper()}` | {default} | {AGENT[name]} |" for name, default in settings.items()]
    programs, others = ([f"| `{name}` | {text} |" for name, text in of.items()] for of in (PROGRAMS, OTHERS))
    tables = (
        ("Of the agent", "| variable | default | meaning |\n|---|---|---|", agent),
        ("Of programs", "| variable | meaning |\n|---|---|", programs),
        ("Of other products", "| variable | meaning |\n|---|---|", others),
    )
    return HEAD + "".join(f"\n## {title}\n\n{head}\n" + "\n".join(rows) + "\n" for title, head, rows in tables)


def _default(value: object) -> str:
    value = value.default if isinstance(value, FieldInfo) else value
    if value in (None, "", (), MISSING):
        return "none"
    return f"`{int(value)}`" if isinstance(value, bool) else f"`{value}`"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page())

"""`python -m rllm_model_gateway`: the gateway with the options that rLLM passes."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.errors import AgentCoreRLError
from agentcore_rl_toolkit.gateway import serve

from .models import GatewayConfig
from .routes import add_routes
from .server import our_config, upstreams_of


def main() -> None:
    parser = argparse.ArgumentParser(prog="rllm-model-gateway", description=__doc__)
    parser.add_argument("--host", help="127.0.0.1; 0.0.0.0 needs AGENTCORE_RL_GATEWAY_ADMIN_KEY")
    parser.add_argument("--port", type=int, help="9090")
    parser.add_argument("--config", metavar="FILE", help="settings of GatewayConfig as YAML; options win")
    parser.add_argument("--worker", action="append", default=[], help="engine; repeat for several")
    parser.add_argument("--store", choices=["sqlite", "memory", "compact"], help="sqlite: keep calls in --db-path")
    parser.add_argument("--db-path", help="directory of the store; ~/.rllm/gateway_traces")
    parser.add_argument("--model", help="model name of every call, whatever the agent names")
    parser.add_argument(
        "--cumulative-token-mode", action="store_true", default=None, help="tokenise here; --model is a directory"
    )
    for option in ("--renderer-family", "--sglang-tool-call-parser", "--sglang-reasoning-parser"):
        parser.add_argument(option, default=None, help="accepted; the template itself decides")
    parser.add_argument("--engine", choices=["vllm", "sglang", "openai", "policy"])
    parser.add_argument("--use-sglang", action="store_const", const="sglang", dest="engine")
    parser.add_argument("--front", action="store_true", help="not offered: one process of ours serves what rLLM shards")
    parser.add_argument("--log-level")
    args = parser.parse_args()
    if args.front:
        parser.error("several gateway processes behind a front are not offered here: set rllm.gateway.num_workers to 1")
    try:
        config = read_config(args)
        logging.basicConfig(level=config.log_level.upper())
    except (OSError, ValueError, ModuleNotFoundError) as e:
        parser.exit(2, f"rllm-model-gateway: error: {e}\n")
    try:
        try:
            import uvloop

            runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        except ImportError:
            runner = asyncio.Runner()
        with runner:
            ours = our_config(config, port=config.port, host=config.host, upstreams=upstreams_of(config))
            runner.run(serve(ours, prepare=add_routes))
    except (AgentCoreRLError, ValueError) as e:
        parser.exit(2, f"rllm-model-gateway: error: {e}\n")


def read_config(args: argparse.Namespace) -> GatewayConfig:
    """Options over RLLM_GATEWAY_* over the file. Raises: OSError, ValueError, ModuleNotFoundError (PyYAML)."""
    values: dict[str, Any] = {}
    if args.config:
        import yaml

        try:
            told = yaml.safe_load(Path(args.config).read_text()) or {}
        except yaml.YAMLError as e:
            raise ValueError(f"{args.config} is not YAML: {e}") from e
        if not isinstance(told, dict):
            raise ValueError(f"{args.config} must hold settings by name")
        values.update(told)
    for name in ("host", "port", "db_path", "log_level"):
        if (value := os.environ.get(f"RLLM_GATEWAY_{name.upper()}")) is not None:
            values[name] = value
    if (value := os.environ.get("RLLM_GATEWAY_STORE")) is not None:
        values["store_worker"] = value
    for name in ("host", "port", "db_path", "log_level", "model", "cumulative_token_mode", "engine"):
        if (value := getattr(args, name)) is not None:
            values[name] = value
    if args.store is not None:
        values["store_worker"] = args.store
    if args.worker:
        values["workers"] = [{"url": url, "worker_id": str(i)} for i, url in enumerate(args.worker)]
    return GatewayConfig(**values)


if __name__ == "__main__":
    main()

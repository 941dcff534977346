"""The command line, run in children of a process that has imported everything: most of what a start costs is paid once.

Reads JSON lines: ``{"words": [...], "output": FILE}``. For each a child runs the command; the process prints the child's pid, and
when it has ended its exit code (negative: the signal). It starts no thread, so that what its children inherit is whole.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import boto3
import botocore.loaders

import agentcore_rl_toolkit.cli.deploy
import agentcore_rl_toolkit.client
import agentcore_rl_toolkit.deploy.deployment
from agentcore_rl_toolkit.cli.main import main

__all__ = ["agentcore_rl_toolkit"]
SERVICES = ("sts", "s3", "iam", "ecr", "bedrock-agentcore", "bedrock-agentcore-control")


def remember_models() -> None:
    """Children read botocore's models in memory."""
    read = botocore.loaders.JSONFileLoader.load_file
    known: dict[str, Any] = {}

    def load_file(self: botocore.loaders.JSONFileLoader, path: str) -> Any:
        if path not in known:
            known[path] = read(self, path)
        return known[path]

    botocore.loaders.JSONFileLoader.load_file = load_file
    for service in SERVICES:
        boto3.Session().client(service).close()


def child(words: list[str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["agentcore-rl", *words]
    try:
        main()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1 if e.code else 0
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    remember_models()
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(asked["words"], asked["output"])
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

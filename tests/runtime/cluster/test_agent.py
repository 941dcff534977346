"""The node agent as a process."""

from __future__ import annotations

import asyncio
import json
import resource
import sys

# The limit is set by the program itself, not between fork and exec: that would be this test's process for a moment.
WITH_FEW_FILES = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
runpy.run_module("agentcore_rl_toolkit.runtime.cluster.agent", run_name="__main__")
"""


async def test_it_may_open_as_many_files_as_its_machine_allows() -> None:
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WITH_FEW_FILES, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    async with asyncio.timeout(60):
        agent.stdin.write(b"token\n")
        ready = json.loads(await agent.stdout.readline())
        soft, _ = resource.prlimit(ready["pid"], resource.RLIMIT_NOFILE)
        agent.stdin.close()  # its parent is gone
        assert await agent.wait() == 0
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert soft == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536))

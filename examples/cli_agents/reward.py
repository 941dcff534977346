"""The reward: a command that checks the workspace after the program has ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

CHECK_S = 60.0


async def reward(workspace: Path, check: str) -> float:
    """Return 1.0 if ``check`` ends with code 0 in the workspace, otherwise 0.0, also if it hangs."""
    process = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        check,
        cwd=workspace,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        return float(await asyncio.wait_for(process.wait(), CHECK_S) == 0)
    except TimeoutError:
        process.kill()
        await process.wait()
        return 0.0

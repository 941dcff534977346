"""Print the files of the client that one rollout passes through, in order.

    python scripts/trace_rollout.py

A scripted runtime answers over HTTP, and a first rollout warms everything up. Then each function of `agentcore_rl_toolkit/client`
that a second rollout calls is recorded, on all threads, once. A return is a call back: from a file to one that calls it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

from agentcore_rl_toolkit import client as package  # noqa: E402
from scripted_runtime import TEST_CREDENTIALS, ScriptedRuntime  # noqa: E402  (a module of the tests)

FOLDER = str(Path(package.__file__).parent)
MOST_FILES, MOST_RETURNS = 9, 12


def traced() -> dict[str, str]:
    """The functions that a rollout calls, as ``file: function``, each with the one that calls it first (or with none)."""
    found: dict[str, str] = {}

    def record(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(FOLDER):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(FOLDER):
            caller = caller.f_back
        found.setdefault(named(frame), "" if caller is None else named(caller))

    with (
        tempfile.TemporaryDirectory() as folder,
        ScriptedRuntime() as runtime,
        package.RolloutClient(runtime.arn, f"file://{folder}", "trace", endpoint_url=runtime.url) as client,
    ):
        client.invoke({"script": {}}).result(60)
        client.flush()
        recording = threading.Event()

        def begin(_: object) -> None:
            sys.setprofile(record)
            recording.set()

        client.submit({"script": {}}).add_done_callback(begin)
        recording.wait(60)
        client.flush()
        found.clear()
        threading.setprofile(record)
        sys.setprofile(record)
        client.invoke({"script": {"run_s": 0.2}}).result(60)
        client.flush()
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def named(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_qualname}"


def main() -> None:
    os.environ |= TEST_CREDENTIALS
    calls = traced()
    descents: set[tuple[str, str]] = set()
    files: dict[str, None] = {}
    returns = 0
    for function, caller in calls.items():
        file, above = function.partition(":")[0], caller.partition(":")[0]
        files[file] = None
        back = (file, above) in descents
        returns += back
        if above and above != file and not back:
            descents.add((above, file))
        print(f"{'  back to ' if back else '          '}{function}" + (f"  (from {caller})" if back else ""))
    print(
        f"{len(files)} files ({MOST_FILES} allowed), {returns} returns ({MOST_RETURNS} allowed), {len(calls)} functions"
    )
    sys.exit(len(files) > MOST_FILES or returns > MOST_RETURNS)


if __name__ == "__main__":
    main()

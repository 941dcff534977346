"""The guide `docs/gateway.md` as a reader follows it: its own blocks, with free ports in place of the page's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "gateway.md"
BLOCK = re.compile(r"<!-- run by: tests/gateway/test_guide\.py -->\n```(\w+)\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.S)


@pytest.mark.timeout(300)
def test_the_guide_works_as_it_stands(tmp_path: Path) -> None:
    serve_policy, serve_gateway, connect, export = BLOCK.findall(GUIDE.read_text())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    environment.pop("AGENTCORE_RL_GATEWAY_ADMIN_KEY", None)
    urls: dict[str, str] = {}

    with ExitStack() as stack:

        def serve(command: str, page_url: str) -> None:
            words = re.sub(r"--port \d+", "--port 0", command).split()
            words = [urls.get(word, word) for word in words]
            server = stack.enter_context(
                subprocess.Popen(
                    [*words, "--parent-pid", str(os.getpid())],
                    cwd=tmp_path,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            stack.callback(server.terminate)
            assert server.stdout is not None
            first = server.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", first)
            assert found, first
            urls[page_url] = found[0]

        serve(serve_policy[1], "http://127.0.0.1:8000")
        serve(serve_gateway[1], "http://127.0.0.1:9090")
        program = connect[1].replace("http://127.0.0.1:9090", urls["http://127.0.0.1:9090"])
        ran = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stderr
        shape = re.compile(r"2 turns, \d+ sampled tokens\n(\d+ tokens, \d+ of them to train on\n)+")
        assert shape.fullmatch(ran.stdout), "what the page shows has the form of what is printed"
        assert shape.fullmatch(connect[2])

    written = subprocess.run(
        ["bash", "-ec", export[1]], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert written.returncode == 0, written.stderr
    rows = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1]
    assert all(len(row["completion_ids"]) == len(row["logprobs"]) for row in rows)

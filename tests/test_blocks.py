"""Every block of commands in README, docs and the examples' READMEs is run, here or by a test it names, or says why not.

The rule is in CONTRIBUTING.md, "Commands in documents".
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
SHELL, PYTHON = {"bash", "sh", "shell", "console"}, {"python", "py"}
FENCE = re.compile(r"^ *(?P<fence>```+)(?P<language>\S*)")
MARKER = re.compile(r"^ *<!-- (?P<below>blocks below: )?(?P<kind>run here|run by|not run)(?:: (?P<what>.*?))? -->\s*$")
A_COMMAND = re.compile(
    r"^ *(\$ )?(\w+=\S+ )*(agentcore-rl|diff|python3?|pip|make|git|export|curl|docker|uv|hf|aws) [\w./'\"$-]"
)


@dataclass(frozen=True)
class Block:
    document: Path
    line: int
    language: str
    text: str
    kind: str | None
    what: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> Iterator[Block]:
    """Blocks of commands with their markers. One of an unnamed language is one of commands when a line looks like one."""
    page: re.Match[str] | None = None
    own: re.Match[str] | None = None
    lines = document.read_text().splitlines()
    at = 0
    while at < len(lines):
        opened = FENCE.match(lines[at])
        if opened is None:
            found = MARKER.match(lines[at])
            if found is not None and found["below"]:
                page = found
            elif found is not None or lines[at].strip():
                own = found
            indented = A_COMMAND.match(lines[at]) and lines[at].startswith("    ") and not lines[at - 1].strip()
            if indented:  # Markdown's other kind of block
                yield Block(document, at + 1, "indented", lines[at], "indented", "")
            at += 1
            continue
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == opened["fence"])
        text, language = "\n".join(lines[at + 1 : end]) + "\n", opened["language"]
        commands = language in SHELL | PYTHON or (not language and any(map(A_COMMAND.match, lines[at + 1 : end])))
        marker = own or page
        if commands:
            kind, what = (marker["kind"], marker["what"] or "") if marker is not None else (None, "")
            proof = document.parent / "proof.py"
            if kind is None and proof.is_file():  # an example that `make examples` runs
                kind, what = "run by", str(proof.relative_to(ROOT))
            yield Block(document, at + 1, language, text, kind, what)
        own, at = None, end + 1


EVERY = [block for document in DOCUMENTS for block in blocks(document)]
RUN_HERE = [block for block in EVERY if block.kind == "run here"]


def test_there_are_blocks_to_look_at() -> None:
    assert len(EVERY) > 40
    assert len(RUN_HERE) > 4


@pytest.mark.parametrize("block", EVERY, ids=str)
def test_a_block_of_commands_says_what_runs_it_or_why_nothing_does(block: Block) -> None:
    assert block.kind != "indented", f"{block}: write commands as ```bash, so that they are found"
    assert block.kind is not None, (
        f"{block}: put one of these before it: <!-- run here -->, <!-- run by: tests/FILE.py::NAME -->, <!-- not run: REASON -->"
    )
    if block.kind == "not run":
        assert len(block.what.split()) >= 2, f"{block}: the reason is missing"
    if block.kind == "run by":
        file, _, name = block.what.partition("::")
        assert (ROOT / file).is_file(), f"{block}: there is no {file}"
        assert file.startswith(("tests/", "benchmarks/", "examples/", "scripts/")), block
        if name:
            assert re.search(rf"^(async )?def {re.escape(name)}\(", (ROOT / file).read_text(), re.MULTILINE), block


@pytest.fixture(scope="module")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What docs/s3.md says: the endpoint with a bucket, and the variables that lead clients there."""
    folder = tmp_path_factory.mktemp("s3")
    [serve] = [b for b in EVERY if b.document.name == "s3.md" and b.text.startswith("agentcore-rl s3 serve")]
    words = serve.text.split()[1:]
    words[words.index("--port") + 1] = "0"
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "agentcore_rl_toolkit", *words, "--ready-file", str(ready)]
    server = subprocess.Popen(
        [*command, "--parent-pid", str(os.getpid())], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        url = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
        assert url is not None
        [exports] = [b for b in EVERY if b.document.name == "s3.md" and b.text.startswith("export")]
        variables = dict(re.findall(r"(AWS_\w+)=(\S+)", exports.text))
        yield {**variables, "AWS_ENDPOINT_URL_S3": url[0]}
    finally:
        server.terminate()
        server.communicate(timeout=30)


@pytest.mark.parametrize("block", RUN_HERE, ids=str)
def test_a_block_that_says_so_runs_as_it_stands(
    block: Block, s3_endpoint: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty folder with `examples/` in it, and with a bucket `results` behind AWS_ENDPOINT_URL_S3."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for name, value in s3_endpoint.items():
        monkeypatch.setenv(name, value)
    if block.language in PYTHON:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # what a page leaves open ends with its reader's program
            exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
        return
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", block.text]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr

"""The Harbor agent's tasks in containers: the same check of a task, with Podman."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from .loading import EXAMPLES, load

EXAMPLE = EXAMPLES / "harbor_agent"
PROGRAMS = ("bash", "sh", "sleep", "timeout", "mkdir", "chmod", "rm", "grep", "cat", "ls", "nproc")
BASE = "localhost/harbor-test/base:latest"

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def images() -> ModuleType:
    """What the runtime's tests know of engines."""
    return load(Path(__file__).parents[1] / "runtime" / "container_images.py")


@pytest.fixture
def engine(images: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Podman in a storage of its own, with an image of a few of this machine's programs: no registry is asked."""
    reason = images.why_not()
    if reason is not None:
        pytest.skip(reason)
    for name, value in images.configure(tmp_path).items():
        monkeypatch.setenv(name, value)
    made = io.BytesIO()
    paths = {f"/bin/{name}" for name in PROGRAMS}
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in ("app", "dev", "etc", "proc", "root", "run", "sys", "tmp", "var/tmp", "bin"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(folder)
        for name in sorted(paths | images._libraries(sorted(paths))):
            tar.add(os.path.realpath(name), arcname=name.lstrip("/"), recursive=False)
    archive = tmp_path / "base.tar"
    archive.write_bytes(made.getvalue())
    done = subprocess.run(
        ["podman", "import", "--quiet", str(archive), BASE], capture_output=True, text=True, timeout=240, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no image can be made here: {done.stderr[-300:]}")
    yield
    images.podman("rm", "--all", "--force", "--time=0", check=False)
    images.podman("rmi", "--all", "--force", check=False)
    images.end_monitors(tmp_path)
    subprocess.run(["umount", str(tmp_path / "graph" / "overlay")], capture_output=True, timeout=20, check=False)


def test_a_task_is_built_solved_and_judged_in_containers_of_its_own(harbor: SimpleNamespace, engine: None) -> None:
    task = harbor.harbor_tasks.HarborTask.of(
        "answer",
        {
            "task.toml": b"[environment]\nallow_internet = false\nmemory_mb = 256\n",
            "instruction.md": b"Write 42 to /app/answer.",
            "environment/Dockerfile": f"FROM {BASE}\nWORKDIR /app\nCOPY question .\nENV MOOD=good\n".encode(),
            "environment/question": b"6 times 7?\n",
            "tests/test.sh": b"if /tests/check.sh; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
            "tests/check.sh": b"#!/bin/bash\ngrep -qsx 42 /app/answer\n",
            "solution/solve.sh": b"#!/bin/bash\necho 42 > /app/answer\n",
        },
    )
    checked = harbor.check_tasks.check(task, "podman")
    assert (checked.oracle, checked.nothing, checked.problem) == (1.0, 0.0, None), checked.problem
    with harbor.sandboxes.choose(task, "podman") as sandbox:
        ran = sandbox.run(
            ["bash", "-c", "echo $PWD $MOOD $MORE; cat question; ls /tests"], limit_s=60, env={"MORE": "x"}
        )
        assert (ran.code, ran.output) == (0, "/app good x\n6 times 7?\n")
        late = sandbox.run(["bash", "-c", "echo begun; sleep 1000"], limit_s=1)
        assert (late.code, late.output) == (None, "begun\n")
        assert sandbox.read("/none") is None
    assert subprocess.run(["podman", "ps", "-aq"], capture_output=True, text=True, check=True).stdout == ""

"""Each session writes to a view of the project that only it has, as root and as an ordinary user."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentcore_rl_toolkit.isolation import sandbox
from agentcore_rl_toolkit.isolation.cover import Cover
from agentcore_rl_toolkit.isolation.hints import VARIABLE, describe, hint
from agentcore_rl_toolkit.isolation.sandbox import no_sandbox
from agentcore_rl_toolkit.isolation.view import BARE_TMP, MAX_COPIED_BYTES

from .test_sandbox import NESTED, USERS, command_of
from .test_sandbox import folders as folders

pytestmark = pytest.mark.skipif(no_sandbox() is not None, reason=f"no sandbox here: {no_sandbox()}")
ISOLATION = Path(sandbox.__file__).parent
# Two forks of one process: each writes, waits until the other has written, and prints what it finds.
SESSIONS = f"""
import os, subprocess, sys
sys.path.insert(0, {str(ISOLATION)!r})
import view
project, *names = sys.argv[1:]
reason, no_overlay = view.try_out(project)
if reason is not None:
    sys.exit(f"no view: {{reason}}")
print(*no_overlay)
written = [os.pipe(), os.pipe()]
children = []
for me in (0, 1):
    child = os.fork()
    if child == 0:
        try:
            view.make(project)
            for name in names:
                with open(os.path.join(project, name), "a") as file:
                    file.write(f" {{me}}")
            os.close(written[me][1])
            os.close(written[1 - me][1])
            os.read(written[1 - me][0], 1)
            found = [open(os.path.join(project, name)).read() for name in names]
            tricks = 'umount "$0" || umount -l "$0"; cat "$0/.env"; mount -t tmpfs x "$0/package"'
            subprocess.run(["sh", "-c", tricks, project], stderr=subprocess.DEVNULL)
            nested = subprocess.run(os.environ["NESTED"], shell=True, capture_output=True, text=True).stdout.split()
            try:
                open(os.path.join(project, "zeros"), "a")
            except OSError as e:
                found.append(e.strerror)
            print(me, found, sorted(os.listdir(project)), nested, flush=True)
        finally:
            os._exit(0)
    children.append(child)
for _, end in written:
    os.close(end)
for child in children:
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("user", USERS)
def test_two_sessions_write_the_same_files_and_each_reads_its_own(
    folders: Callable[[str], Path], user: list[str]
) -> None:
    project, listings = folders("a project, 日本: \\x"), folders("listings")
    files = ("rows.db", "package/module.py", "package/data/state", "hidden/beside")
    for name in (*files, ".env", "hidden/answers"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("outside")
    (project / "zeros").write_bytes(bytes(MAX_COPIED_BYTES))
    (project / "procfs").mkdir()
    for path in [project, *project.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
        if user:
            os.chown(path, 65534, 65534)
    covers = Cover(project / "agent.py", [project], [], [project / "hidden/answers"], root=listings).mounts
    covers |= {str(project / "procfs"): "/proc/sys"}  # the kernel stacks no overlay on this file system
    for folder in [listings, *listings.rglob("*")]:
        folder.chmod(0o777)
    tmp = folders("tmp")
    if user:
        os.chown(tmp, 65534, 65534)
    names = [*files, "new", "package/new", "/tmp/new"]
    words = [
        *user,
        *command_of(user, [project, ISOLATION], covers=covers, tmp=str(tmp)),
        "/usr/bin/python3",
        "-c",
        SESSIONS,
    ]
    environment = {"PATH": os.environ["PATH"], "NESTED": " ".join([*NESTED[:-1], "'id -u'"])}
    done = subprocess.run(
        [*words, str(project), *names], capture_output=True, text=True, timeout=60, cwd="/", env=environment
    )
    if "no view" in done.stderr:
        pytest.skip(done.stderr.strip())
    shown = [".env", "hidden", "new", "package", "procfs", "rows.db", "zeros"]
    assert done.stdout.splitlines()[:1] == [str(project / "procfs")], done.stderr
    for me in (0, 1):
        found = [f"outside {me}"] * len(files) + [f" {me}"] * 3 + ["Read-only file system"]
        assert f"{me} {found} {shown} ['0']" in done.stdout.splitlines(), (done.stdout, done.stderr)
    assert {(project / name).read_text() for name in files} == {"outside"}
    assert not (project / "new").exists()


def test_a_tmp_that_allows_no_overlay_is_shared_and_stays_writable(folders: Callable[[str], Path]) -> None:
    project, tmp = folders("project"), folders("tmp")
    covers = {BARE_TMP: "/proc/sys"}  # the kernel stacks no overlay on this file system
    code = f"import sys; sys.path.insert(0, {str(ISOLATION)!r}); import view; print(view.try_out({str(project)!r}))"
    code += f"; print(view.make({str(project)!r})); open('/tmp/new', 'w').write('shared')"
    words = [*command_of([], [project, ISOLATION], covers=covers, tmp=str(tmp)), "/usr/bin/python3", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd="/")
    if not done.stdout.startswith("(None"):
        pytest.skip(f"no view: {done.stdout}")
    assert done.stdout.splitlines()[1:] == ["['/tmp']"], done.stderr
    assert (tmp / "new").read_text() == "shared"


def test_an_error_about_a_full_view_shows_its_limit_and_larger_folders() -> None:
    full, facts = OSError(28, "No space left on device"), describe(["/usr"], [])
    assert hint(full, {VARIABLE: facts}) is None
    text = str(hint(full, {VARIABLE: facts.replace("}", ', "view": "1024 MiB in 9 files"}')}))
    assert "may write 1024 MiB in 9 files to the agent's project, /tmp, /dev/shm and the agent's home folder" in text
    assert "--writable DIR" in text


def test_an_error_about_the_project_says_why_it_is_read_only() -> None:
    facts = describe(["/usr", "/project", sys.base_prefix], [])
    refused, environment = OSError(30, "Read-only file system", "/project/rows.db"), {VARIABLE: facts}
    environment[VARIABLE] = facts.replace("}", ', "no_view": "unshare: Operation not permitted"}')
    database = type("OperationalError", (Exception,), {})("attempt to write a readonly database")
    for error in (refused, database):
        text = str(hint(error, environment))
        assert "the kernel gives a session no view (unshare: Operation not permitted)" in text
        assert "--copy PATH" in text

"""What a command sees and may do in the sandbox of an agent version, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.isolation.cover import Cover, private_files
from agentcore_rl_toolkit.isolation.hints import VARIABLE, describe, hint
from agentcore_rl_toolkit.isolation.sandbox import command, interpreter_paths, no_sandbox, project_of

from ..runtime.test_roots import make_deep

pytestmark = pytest.mark.skipif(no_sandbox() is not None, reason=f"no sandbox here: {no_sandbox()}")
NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
USERS = [pytest.param([], id="this user")]
if os.geteuid() == 0 and shutil.which("setpriv"):
    USERS.append(pytest.param(NOBODY, id="an ordinary user"))

TRY = """
import json, os, sys
said = {}
for name, what in json.loads(sys.argv[1]).items():
    kind, path = what
    try:
        if kind == "read":
            said[name] = sorted(os.listdir(path)) if os.path.isdir(path) else open(path).read()
        else:
            open(path, "w").write("x")
            said[name] = "written"
    except OSError as e:
        said[name] = type(e).__name__
print(json.dumps(said))
"""
# As an agent that runs its tools in sandboxes of its own makes one: with its own users, processes and network.
NESTED = [
    *("bwrap", "--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0", "--die-with-parent", "--as-pid-1"),
    *("--new-session", "--cap-drop", "ALL", "--clearenv", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--dev", "/dev", "--proc", "/proc"),
    *("--tmpfs", "/tmp", "--", "/bin/sh", "-c", "id -u; ls -d /proc/1"),
]


def command_of(user: list[str], *paths: Any, **covers: Any) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        if user:
            patch.setattr(os, "geteuid", lambda: 65534)
        return command(*paths, **covers)


@pytest.fixture
def folders() -> Callable[[str], Path]:
    """Makes folders that an ordinary user may use; of pytest's own only this user may."""
    made = []

    def make(name: str) -> Path:
        top = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
        made.append(top)
        top.chmod(0o755)
        folder = top / name
        folder.mkdir()
        folder.chmod(0o777)
        return folder

    yield make
    for top in made:
        shutil.rmtree(top)


@pytest.mark.parametrize("user", USERS)
def test_only_what_is_named_is_there_and_only_what_is_writable_changes(
    folders: Callable[[str], Path], user: list[str]
) -> None:
    shown, own, elsewhere = folders("shown"), folders("own"), folders("elsewhere")
    keys = shown / "keys"
    keys.mkdir()
    (keys / "key").write_text("secret")
    for folder in (shown, own, elsewhere):
        (folder / "file").write_text(folder.name)
    if os.geteuid() == 0:  # to root the files of all users are open
        os.chown(own, 65534, 65534)
        own.chmod(0o700)
    python = "/usr/bin/python3"
    wanted = {
        "shown": ("read", str(shown / "file")),
        "key": ("read", str(keys / "key")),
        "change shown": ("write", str(shown / "file")),
        "own": ("write", str(own / "new")),
        "elsewhere": ("read", str(elsewhere / "file")),
        "write elsewhere": ("write", str(elsewhere / "new")),
        "home": ("read", str(Path.home())),
        "system": ("write", "/usr/planted"),
        "top": ("write", "/planted"),
        "tmp": ("write", "/tmp/scratch"),
    }
    agent, listings = folders("agent") / "agent.py", folders("listings")
    covers = Cover(agent, [shown], [own], [keys], root=listings).mounts
    for folder in listings.iterdir():
        folder.chmod(0o755)
    words = [
        *user,
        *command_of(user, [shown, Path("/nowhere")], [own], covers=covers),
        python,
        "-c",
        TRY,
        json.dumps(wanted),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, cwd="/")
    said = json.loads(done.stdout)
    assert (said.pop("shown"), said.pop("own"), said.pop("tmp")) == ("shown", "written", "written")
    assert set(said.values()) <= {"FileNotFoundError", "OSError", "PermissionError"}
    assert (own / "new").exists()
    assert not (Path("/tmp") / "scratch").exists()


def test_hidden_files_stay_hidden_while_folders_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    project, sibling = tmp_path / "project", tmp_path / "sibling"
    rows, env, passing = project / "data" / "eval" / "rows.jsonl", sibling / ".env", project / "passing.tmp"
    for file in (rows, env, sibling / "runs" / "one" / "ledger.jsonl", passing):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("secret")
    covers = Cover(project / "agent.py", [project, sibling], [], [rows], root=tmp_path).mounts
    passing.unlink()
    look = f"cat {rows} {env}; ls {sibling}/runs; echo seen; read go; cat {rows} {env}; ls {sibling}/runs"
    words = [*command([project, sibling], covers=covers), "sh", "-c", look]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        assert session.stdout.readline() == "seen\n"
        for file in (rows, env):
            shutil.rmtree(file.parent)
            file.parent.mkdir()
            file.write_text("secret")
        assert session.communicate("\n", 60) == ("", None)
    for number in range(501):
        (sibling / str(number)).touch()
    assert not caplog.messages
    Cover(project / "agent.py", [sibling], [], [], root=tmp_path)
    assert f"{sibling} has many entries" in caplog.text


@pytest.mark.parametrize("user", USERS)
def test_nothing_of_a_process_outside_can_be_read(folders: Callable[[str], Path], user: list[str]) -> None:
    key, secret = folders("home") / "key", uuid.uuid4().hex
    key.write_text(secret)
    look = (
        "import glob, pathlib, sys\nfound = []\n"
        "for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/root' + sys.argv[1]):\n"
        "    try:\n        found += [path] * (sys.argv[2][::-1].encode() in pathlib.Path(path).read_bytes())\n"
        "    except OSError:\n        pass\n"
        "print(found)"
    )
    inside = [*command_of(user), "/usr/bin/python3", "-c", look, str(key), secret[::-1]]
    outside = "import subprocess, sys; subprocess.run(sys.argv[1:], env={'PATH': '/usr/bin:/bin'}, check=True)"
    words = [*user, "/usr/bin/python3", "-c", outside, *inside]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, cwd="/", env={"KEY": secret, "PATH": os.environ["PATH"]}
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@pytest.mark.parametrize("user", USERS)
def test_a_sandbox_inside_the_sandbox_works(user: list[str]) -> None:
    done = subprocess.run([*user, *command_of(user), *NESTED], capture_output=True, text=True, timeout=60, cwd="/")
    assert (done.stdout.split(), done.returncode) == (["0", "/proc/1"], 0), done.stderr


def test_the_interpreter_of_this_environment_runs_inside(tmp_path: Path) -> None:
    python = Path(sys.executable)
    words = [
        *command(interpreter_paths(python), [tmp_path]),
        str(python),
        "-c",
        "import sys, pytest; print(sys.prefix)",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd="/")
    assert (done.stdout.strip(), done.returncode) == (sys.prefix, 0), done.stderr


def test_the_project_is_the_git_checkout_else_the_package_else_the_folder_and_never_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "repo" / "agents" / "one"
    folder.mkdir(parents=True)
    script = folder / "agent.py"
    assert project_of(script) == folder
    (tmp_path / "repo" / "agents" / "pyproject.toml").touch()
    assert project_of(script) == folder.parent
    (tmp_path / "repo" / ".git").mkdir()
    assert project_of(script) == tmp_path / "repo"
    monkeypatch.setenv("HOME", str(tmp_path / "repo"))
    assert project_of(script) == folder.parent
    assert project_of(tmp_path / "repo" / "agent.py") == tmp_path / "repo" / "agent.py"


def test_errors_about_paths_outside_name_the_sandbox_and_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {VARIABLE: describe(["/usr", "/project", sys.base_prefix], ["/store"])}
    outside = hint(FileNotFoundError(2, "No such file or directory", "/data/x.db"), environment)
    assert outside is not None
    assert "/data/x.db is not in the sandbox" in outside
    assert "--readable DIR" in outside
    read_only = hint(OSError(30, "Read-only file system", "/project/out.txt"), environment)
    assert read_only is not None
    assert "read-only in the sandbox" in read_only
    assert "--writable DIR" in read_only
    database = type("OperationalError", (Exception,), {})("attempt to write a readonly database")
    assert "--writable DIR" in str(hint(database, environment))
    missing = ModuleNotFoundError("No module named 'fastapi'", name="fastapi")
    assert str(hint(missing, environment)).startswith("If fastapi is a package, list it in requirements.txt")
    monkeypatch.syspath_prepend(str(tmp_path / "shared"))
    assert f"{tmp_path}/shared, which the sandbox does not show" in str(hint(missing, environment))
    for error in (FileNotFoundError(2, "No such file or directory", "/project/absent"), ValueError("x")):
        assert hint(error, environment) is None
    assert hint(FileNotFoundError(2, "No such file or directory", "/data/x.db"), {}) is None


@pytest.mark.parametrize("environment", [{VARIABLE: "{}"}, {"AWS_ACCESS_KEY_ID": "local"}, {}])
def test_an_error_about_a_variable_that_a_session_lacks_names_the_option(environment: dict[str, str]) -> None:
    with pytest.raises(KeyError) as raised:
        os.environ["SEARCH_TOKEN"]
    for error in (raised.value, ValueError("the environment variable SEARCH_TOKEN is missing")):
        found = hint(error, environment)
        assert ("--session-env SEARCH_TOKEN" in str(found)) is bool(environment)
        assert hint(error, {**environment, "SEARCH_TOKEN": "x"}) is None
    assert hint(KeyError("SEARCH_TOKEN"), environment) is hint(ValueError("SEARCH_TOKEN"), environment) is None


def test_an_environment_that_is_a_link_in_the_project_is_shown(tmp_path: Path) -> None:
    project, environment = tmp_path / "project", tmp_path / "environment"
    for folder in (project, environment):
        folder.mkdir()
    (environment / "library").write_text("found")
    (project / ".venv").symlink_to(environment)
    (project / ".env").write_text("secret")  # so that the project is shown entry by entry
    covers = Cover(project / "agent.py", [project, project / ".venv"], [], [], root=tmp_path).mounts
    words = [*command([project, project / ".venv"], covers=covers), "cat", f"{project}/.venv/library"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd="/")
    assert (done.stdout, done.returncode) == ("found", 0), done.stderr


def test_a_deep_folder_of_the_project_is_searched(tmp_path: Path) -> None:
    deep = tmp_path / "project" / "left"
    make_deep(deep)
    (deep / "deep" / "api.key").write_text("secret")
    (deep / "deep" / "circle").symlink_to("circle")
    assert [*private_files(str(tmp_path / "project"))] == [deep / "deep" / "api.key"]
    subprocess.run(["rm", "-rf", str(deep)], check=True)  # the removal by pytest is recursive


def test_installed_packages_on_the_import_path_are_not_searched(tmp_path: Path) -> None:
    project, packages = tmp_path / "project", tmp_path / "lib" / "site-packages"
    (packages / "proxy").mkdir(parents=True)
    project.mkdir()
    (packages / "proxy" / "ca.key").write_text("a key that everybody has")
    covers = Cover(project / "agent.py", [project, packages], [], [], root=tmp_path).mounts
    assert not [path for path in covers if path.startswith(str(packages))]

"""Sessions that try to get out. Per tier: stopped, or not stopped as the tier's report says.

The attacks are bounded: a few dozen processes, a few hundred megabytes, a few files.
"""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest

from ..runtime.conftest import wait_for
from .conftest import NOBODY, Launcher, Session, asked, linux_only

pytestmark = linux_only

VICTIM = Session("open('secret', 'w').write('s3cret'); say('ready'); import time; time.sleep(600)", stays=True)
ATTEMPT = """
def attempt(action):
    try:
        return ["done", action()]
    except OSError as e:
        return ["refused", type(e).__name__]
import os, socket, time
"""
CONFINED = ("namespaces", "landlock")


def attack(launcher: Launcher, code: str, **spec: object) -> tuple[object, bool]:
    """What an attacker said about its attempt beside a victim session, and whether the victim was alive afterwards."""
    victim, attacker = launcher.run(VICTIM, Session(ATTEMPT + code, spec=dict(spec)))
    assert victim.reported == "ready", launcher.errors
    assert attacker.status == 0, launcher.errors
    return attacker.reported, bool(victim.alive_after)


def test_reading_another_sessions_file(launcher: Launcher) -> None:
    answer, _ = attack(launcher, "say(attempt(lambda: open(OTHER_DIR + '/secret').read()))")
    if launcher.tier in CONFINED:
        assert answer[0] == "refused"
    else:
        assert answer == ["done", "s3cret"]  # the process tier stops nothing of this, and says so


def test_finding_other_sessions(launcher: Launcher) -> None:
    answer, _ = attack(launcher, "say(attempt(lambda: sorted(os.listdir(os.path.dirname(os.getcwd())))))")
    expected = {
        "namespaces": ["done", ["s1"]],
        "landlock": ["refused", "PermissionError"],
        "process": ["done", ["s0", "s1"]],
    }
    assert answer == expected[launcher.tier]


def test_writing_into_another_sessions_folder(launcher: Launcher) -> None:
    answer, _ = attack(launcher, "say(attempt(lambda: open(OTHER_DIR + '/planted', 'w').write('x')))")
    assert (answer[0] == "refused") == (launcher.tier in CONFINED)
    assert (launcher.folder / "s0" / "planted").exists() == (launcher.tier not in CONFINED)


@pytest.mark.parametrize("whose", ["OTHER_PID", "DRIVER_PID"])
def test_reading_the_environment_of_other_processes(launcher: Launcher, whose: str) -> None:
    answer, _ = attack(launcher, f"say(attempt(lambda: 'MARK=' in open(f'/proc/{{{whose}}}/environ').read()))")
    if launcher.tier in CONFINED:
        assert answer[0] == "refused"
    else:
        assert answer == ["done", True]


def test_only_its_own_processes_are_visible_in_namespaces(namespaces: Launcher) -> None:
    code = "say(sorted(int(n) for n in os.listdir('/proc') if n.isdigit()))"
    assert attack(namespaces, code)[0] == [1]


def test_killing_another_sessions_process(launcher: Launcher) -> None:
    answer, alive = attack(launcher, "say(attempt(lambda: os.kill(OTHER_PID, 9))); time.sleep(0.1)")
    if launcher.tier in CONFINED:
        assert answer[0] == "refused"
        assert alive
    else:
        assert answer[0] == "done"
        assert not alive


def test_killing_everybody_reaches_only_oneself_in_namespaces(namespaces: Launcher) -> None:
    code = "assert os.getpid() == 1\nsay(attempt(lambda: os.kill(-1, 9))); time.sleep(0.1)"
    _, alive = attack(namespaces, code)
    assert alive


@pytest.mark.parametrize("path", ["/usr/planted", "/etc/planted", "/planted", "/var/planted", "{outside}/planted"])
def test_writing_outside(launcher: Launcher, path: str) -> None:
    path = path.format(outside=launcher.folder.parent)
    if launcher.tier == "process" and not path.startswith(str(launcher.folder.parent)):
        pytest.skip("the process tier would really write there")
    answer = launcher.one(ATTEMPT + f"say(attempt(lambda: open({path!r}, 'w').write('x')))")
    mine = launcher.tier == "process" and launcher.user == "root"
    if launcher.tier != "namespaces":  # there it may write into its private /tmp, which leads nowhere
        assert answer[0] == ("done" if mine else "refused")
    assert Path(path).exists() == mine


def test_its_own_folder_is_writable(launcher: Launcher) -> None:
    launcher.one(
        "import os; os.makedirs('a/b'); open('a/b/c', 'w').write('x'); os.rename('a/b/c', 'a/d'); say(os.getcwd())"
    )
    assert (launcher.folder / "s0" / "a" / "d").read_text() == "x"


def test_slash_tmp_is_private_in_namespaces(namespaces: Launcher) -> None:
    name = f"planted-{os.getpid()}"
    assert namespaces.one(f"import os; open('/tmp/{name}', 'w').write('x'); say(os.listdir('/tmp'))") != []
    assert not Path("/tmp", name).exists()


def test_host_wide_kernel_settings_cannot_be_changed(launcher: Launcher) -> None:
    # Opened for writing only; nothing is written.
    answer = launcher.one(
        ATTEMPT + "say(attempt(lambda: os.close(os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY))))"
    )
    assert answer[0] == ("done" if launcher.tier == "process" and launcher.user == "root" else "refused")


def test_no_capabilities_and_no_way_to_regain_them(launcher: Launcher) -> None:
    entries = launcher.one(
        "say(dict(line.split(':\\t')[:2] for line in open('/proc/self/status').read().splitlines()))"
    )
    if launcher.tier in CONFINED:
        assert int(entries["CapEff"], 16) == int(entries["CapPrm"], 16) == 0
        assert entries["NoNewPrivs"] == "1"
        if launcher.user == "root":
            assert int(entries["CapBnd"], 16) == 0


@pytest.mark.parametrize("path", ["/etc/shadow", "/root", "/home", "/var/log", "/boot", "/sys/fs/cgroup"])
def test_the_hosts_private_places_are_not_there(namespaces: Launcher, path: str) -> None:
    code = f"say([len(os.listdir({path!r})) if os.path.isdir({path!r}) else len(open({path!r}).read())])"
    answer = namespaces.one(
        ATTEMPT + f"r = attempt(lambda: None)\ntry:\n    {code}\nexcept OSError as e:\n    say('refused')"
    )
    allowed: list[object] = ["refused", [0]]
    if path == "/root" and namespaces.user == "root":
        allowed.append([1])  # the folder on the way to an interpreter that lives there
    assert answer in allowed


def test_hidden_places_inside_readable_ones(launcher: Launcher) -> None:
    if launcher.tier == "process":
        pytest.skip("hides nothing")
    project = launcher.folder.parent / "project"
    for name in ("code.py", "keys/private", "keys/deep/er"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    project.chmod(0o755)
    code = ATTEMPT + (
        f"say([attempt(lambda: open({str(project / 'code.py')!r}).read()), "
        f"attempt(lambda: open({str(project / 'keys/private')!r}).read()), "
        f"attempt(lambda: open({str(project / 'keys/deep/er')!r}).read())])"
    )
    shown, *gone = launcher.one(code, read_only=(project,), hidden=(project / "keys",))
    assert shown == ["done", "x"]
    assert [g[0] for g in gone] == ["refused", "refused"]


def test_covers_and_read_only_mounts_cannot_be_lifted_from_a_user_namespace(launcher: Launcher) -> None:
    """Anybody may make a user namespace and be privileged in it; what was mounted before must stay as it is."""
    if launcher.tier == "process":
        pytest.skip("covers nothing")
    project = launcher.folder.parent / "project"
    (project / "keys").mkdir(parents=True)
    (project / "keys" / "private").write_text("s3cret")
    (project / "code.py").write_text("x")
    project.chmod(0o755)
    code = f"""
import ctypes
libc = ctypes.CDLL(None)
privileged = libc.unshare(0x10000000 | 0x00020000) == 0 and "CapEff:\\t0000000000000000" not in open("/proc/self/status").read()
lifted = libc.umount2(b"{project}/keys", 2) == 0
writable = [libc.mount(b"none", p, None, 4096 | 32, None) == 0 for p in (b"{project}", b"/usr")]
try:
    secret = open("{project}/keys/private").read()
except OSError:
    secret = ""
say([privileged, lifted, writable, secret])
"""
    answer = launcher.one(code, read_only=(project,), hidden=(project / "keys",))
    assert answer[1:] == [False, [False, False], ""]
    if launcher.tier == "namespaces":
        assert answer[0], "the attempt was not made with privileges"


def test_session_folders_inside_a_readable_project_stay_private(launcher: Launcher) -> None:
    """A state folder inside the agent's own project, which is readable: the other sessions must not be."""
    if launcher.tier == "process":
        pytest.skip("hides nothing")
    answer, _ = attack(
        launcher, "say(attempt(lambda: open(OTHER_DIR + '/secret').read()))", read_only=(launcher.folder.parent,)
    )
    assert answer[0] == "refused"
    assert launcher.one("open('mine', 'w').write('x'); say(1)", read_only=(launcher.folder.parent,)) == 1


# --- resources ---------------------------------------------------------------------------------------------------------------

FORK_BOMB = """
import os, signal, time
children = []
try:
    for _ in range(60):
        pid = os.fork()
        if pid == 0:
            time.sleep(20)
            os._exit(0)
        children.append(pid)
except OSError as e:
    pass
for pid in children:
    os.kill(pid, signal.SIGKILL)
say(len(children))
"""


def test_fork_bomb(launcher: Launcher) -> None:
    count = launcher.one(FORK_BOMB, limits=_limits(processes=20))
    if _bounded(launcher, "processes"):
        assert count < 20
    else:
        assert count == 60  # root without control groups is exempt; the tier's report does not list the limit


def _bounded(launcher: Launcher, name: str) -> bool:
    """Whether the tier's report, asked as that user, says that the limit holds."""
    return name in asked(launcher, f"list(TIERS[{launcher.tier!r}].describe().limits)")


def _limits(**values: object) -> object:
    from agentcore_rl_toolkit.isolation import Limits

    return Limits(**values)  # type: ignore[arg-type]


def test_filling_memory(launcher: Launcher) -> None:
    code = """
kept = []
try:
    for i in range(40):
        kept.append(bytearray(b'x') * (16 << 20))
except MemoryError:
    kept.clear()
    say('MemoryError')
else:
    say('filled')
"""
    [result] = launcher.run(Session(code, spec={"limits": _limits(memory_bytes=200 << 20)}))
    assert result.reported == "MemoryError" or result.status == -signal.SIGKILL, launcher.errors


def test_filling_one_file(launcher: Launcher) -> None:
    code = ATTEMPT + "say(attempt(lambda: open('big', 'wb', buffering=0).write(b'x' * (3 << 20))))"
    answer = launcher.one(code, limits=_limits(file_bytes=1 << 20))
    assert answer == ["done", 1 << 20] or answer[0] == "refused"
    assert (launcher.folder / "s0" / "big").stat().st_size <= 1 << 20


def test_filling_slash_tmp_ends_at_its_size(namespaces: Launcher) -> None:
    code = (
        ATTEMPT
        + "say(attempt(lambda: [open(f'/tmp/{i}', 'wb', buffering=0).write(b'x' * (1 << 20)) for i in range(20)]))"
    )
    assert namespaces.one(code, limits=_limits(tmp_bytes=4 << 20))[0] == "refused"


def test_many_files_in_its_own_folder_are_not_bounded_in_sum(launcher: Launcher) -> None:
    """Stated by every tier's report; a test so that the statement stays true."""
    code = (
        ATTEMPT + "say(attempt(lambda: sum(open(str(i), 'wb', buffering=0).write(b'x' * (1 << 20)) for i in range(8))))"
    )
    assert launcher.one(code, limits=_limits(file_bytes=1 << 20)) == ["done", 8 << 20]


def test_opening_many_files(launcher: Launcher) -> None:
    code = ATTEMPT + "say(attempt(lambda: len([open('/dev/null') for _ in range(100)])))"
    assert launcher.one(code, limits=_limits(open_files=40))[0] == "refused"


def test_processor_time_is_shared_out(launcher: Launcher) -> None:
    if not _bounded(launcher, "cpus"):
        pytest.skip("no control group for CPU is usable here")
    code = "import time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass\nsay(time.process_time())"
    assert launcher.one(code, limits=_limits(cpus=0.2)) < 0.6


# --- staying behind ----------------------------------------------------------------------------------------------------------

# A lock is held as long as a process has the file open, and released by the kernel when the last of them is gone.
HOLD = """
import fcntl, os, time
def hold():
    held = open('held', 'w')
    fcntl.flock(held, fcntl.LOCK_EX)
    open('ready', 'w').close()
    for _ in range(1200):
        if os.path.exists('enough'):
            break
        time.sleep(0.05)
"""
DAEMON = (
    HOLD
    + """
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    for fd in (0, 1, 2):
        os.close(fd)
    if os.fork() == 0:
        os.close(out)
        os.close(write)
        hold()
    os._exit(0)
while not os.path.exists('ready'):
    time.sleep(0.01)
say('left a daemon')
"""
)


def held(folder: Path) -> bool:
    """Whether a process that was started in a session's folder still lives."""
    with (folder / "held").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_daemon_left_behind(launcher: Launcher) -> None:
    """In namespaces it ends with its session. Elsewhere it lives on: the launcher has to adopt and kill it."""
    assert launcher.one(DAEMON) == "left a daemon"
    session = launcher.folder / "s0"
    if launcher.tier != "namespaces":
        assert held(session)
        (session / "enough").touch()
    wait_for(lambda: not held(session), within_s=30)


def test_sessions_in_namespaces_die_with_their_launcher(namespaces: Launcher) -> None:
    stays = Session(HOLD + "say(1)\nhold()", stays=True, timeout_s=90)
    process = namespaces.start(stays, Session("import time; time.sleep(600); say(1)", timeout_s=600))
    session = namespaces.folder / "s0"
    wait_for((session / "ready").exists)
    assert held(session)
    process.kill()
    process.communicate(timeout=30)
    wait_for(lambda: not held(session), within_s=30)  # by itself it would go on


DEVICES = """
mode = os.stat('/dev/null').st_mode & 0o7777
say([
    attempt(lambda: os.chmod('/dev/null', mode)),
    attempt(lambda: os.chown('/dev/null', -1, -1)),
    attempt(lambda: os.utime('/dev/null')),
    attempt(lambda: os.fchmod(os.open('/dev/zero', os.O_RDWR), mode)),
    attempt(lambda: os.rename('/dev/null', '/dev/other')),
    attempt(lambda: os.write(os.open('/dev/null', os.O_RDWR), b'x')),
    attempt(lambda: os.read(os.open('/dev/zero', os.O_RDWR), 3).hex()),
    attempt(lambda: len(os.read(os.open('/dev/urandom', os.O_RDONLY), 3))),
])
"""


@pytest.mark.threat(
    who="a session",
    tries="change owner, mode or times of the machine's devices, which its /dev shows",
    stopped_by="`namespaces`: the devices are mounted so that they can be written to and not changed",
    leaves="`landlock`, `process`: devices of this user, which for root are the machine's",
)
def test_devices_can_be_used_and_not_changed(namespaces: Launcher) -> None:
    *changed, wrote, zeros, random = namespaces.one(ATTEMPT + DEVICES)
    assert [how for how, _ in changed] == ["refused"] * 5
    assert (wrote, zeros, random) == (["done", 1], ["done", "000000"], ["done", 3])


METADATA = """
import resource
target = os.path.dirname(os.path.dirname(OTHER_DIR)) + '/target'
def limit(pid):
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    return resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard)) and True
say({
    'mode': attempt(lambda: os.chmod(target, 0o600)),
    'times': attempt(lambda: os.utime(target, (1, 1))),
    'group': attempt(lambda: os.chown(target, -1, os.getgid())),
    'attribute': attempt(lambda: os.setxattr(target, 'user.planted', b'x')),
    'priority': attempt(lambda: os.setpriority(os.PRIO_PROCESS, DRIVER_PID, os.getpriority(os.PRIO_PROCESS, DRIVER_PID))),
    'affinity': attempt(lambda: os.sched_setaffinity(DRIVER_PID, os.sched_getaffinity(DRIVER_PID))),
    'limits of others': attempt(lambda: limit(DRIVER_PID)),
    'limits of itself': attempt(lambda: limit(0)),
    'content': attempt(lambda: open(target).read()),
})
"""


@pytest.mark.threat(
    who="a session",
    tries="change mode, times, group or attributes of this user's files outside its lists, or limits of the runtime",
    stopped_by="`namespaces`: they are not there; `landlock`: limits by a system call filter",
    leaves="`landlock`: mode, times, group, attributes of files, priority and affinity of processes; its report lists them",
)
def test_changing_what_belongs_to_a_file_or_a_process_but_its_content(launcher: Launcher) -> None:
    target = launcher.folder.parent / "target"
    target.write_text("of the host")
    if launcher.identity:
        os.chown(target, NOBODY, NOBODY)
        launcher.folder.parent.chmod(0o755)
    answer, _ = attack(launcher, METADATA)
    done = {what for what, (how, _) in answer.items() if how == "done"}
    files = {"mode", "times", "group", "attribute"}
    if launcher.tier == "namespaces":
        assert done == {"limits of itself"}
        assert target.stat().st_mtime != 1
    elif (
        launcher.tier == "landlock"
    ):  # a filter cannot see which file is meant; test_tiers holds that the report says so
        assert done - {"priority", "affinity"} == files | {"limits of itself"}
        if launcher.user == "ordinary":  # root's own processes have privileges that the session has given up
            assert {"priority", "affinity"} <= done
    else:
        assert done == set(answer)

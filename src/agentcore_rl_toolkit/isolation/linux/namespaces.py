"""Namespaces for a forked session: user (unless privileged), pid, mount, IPC, UTS and, on request, network.

A pid namespace begins with the *next* fork, so it cannot be entered by a process alone. Two ways lead there:

- `fork` replaces ``os.fork()`` in the launcher. Privileged, it sets the namespace for its next child, forks, and sets it back.
  Unprivileged, that way back does not exist; a middle process makes the namespaces, forks the session, reports its pid and
  ends, and the launcher, as subreaper, becomes the parent of the session. In both cases the returned pid is a child of the
  caller, in the caller's numbering, and the session is pid 1 of its namespace: when it dies, the kernel kills everything in it.
- A process that was forked plainly and calls `enter` instead is split: the caller goes on as pid 1 of the new namespace in a
  child, while its former self stays behind, passes signals on, waits, and exits as the child did.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import select
import signal
import socket
import struct
from collections.abc import Callable

from ..spec import IsolationSpec
from . import calls

_PER_SESSION = calls.CLONE_NEWNS | calls.CLONE_NEWIPC | calls.CLONE_NEWUTS
_JOINED = {
    "user": calls.CLONE_NEWUSER,
    "pid": calls.CLONE_NEWPID,
    "mnt": calls.CLONE_NEWNS,
    "ipc": calls.CLONE_NEWIPC,
    "uts": calls.CLONE_NEWUTS,
    "net": calls.CLONE_NEWNET,
}
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_WAITED_FOR = {*_PASSED_ON, signal.SIGALRM, signal.SIGCHLD}
_PR_SET_CHILD_SUBREAPER = 36
_NS_GET_USERNS = 0xB701
_ORPHAN_GRACE_S = 30  # for a loader to end its sessions when the runtime is gone


def fork(spec: IsolationSpec) -> int:
    """Fork a child that is pid 1 of a new pid namespace. Returns: 0 in the child, its pid (a direct child) in the caller."""
    parent = os.pidfd_open(os.getpid())
    try:
        if not calls.has_sys_admin():
            pid = _fork_through_middle()
        elif _owns_pid_namespace():
            pid = _fork_privileged()
        else:  # a confined loader: it may make namespaces, but not come back to its own
            pid = _fork_through_middle(functools.partial(calls.unshare, calls.CLONE_NEWPID))
        if pid == 0 and spec.die_with_parent:
            _die_with(parent)
        return pid
    finally:
        os.close(parent)


@functools.cache
def _owns_pid_namespace() -> bool:
    """Whether our pid namespace belongs to our user namespace, so that we may enter it again."""
    with open("/proc/self/ns/pid") as namespace:
        try:
            owner = fcntl.ioctl(namespace, _NS_GET_USERNS)
        except OSError:  # it belongs to one above ours, out of our sight
            return False
    try:
        return os.fstat(owner).st_ino == os.stat("/proc/self/ns/user").st_ino
    finally:
        os.close(owner)


def _fork_privileged() -> int:
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        calls.unshare(calls.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                calls.setns(own, calls.CLONE_NEWPID)
        return pid
    finally:
        os.close(own)


def _fork_through_middle(enter: Callable[[], None] | None = None) -> int:
    """Fork by way of a middle process that ends at once; the session becomes our child because we are its subreaper."""
    calls.prctl(_PR_SET_CHILD_SUBREAPER, 1, what="subreaper")
    read, write = os.pipe()
    middle = os.fork()
    if middle:
        os.close(write)
        with os.fdopen(read, "rb") as answer:
            text = answer.read()
        with contextlib.suppress(ChildProcessError):  # the caller's own reaper may be quicker
            os.waitpid(middle, 0)
        kind, _, rest = text.partition(b" ")
        if kind == b"pid":
            return int(rest)
        raise OSError(rest.decode(errors="replace") or "the middle process died before it could fork the session")
    try:
        os.close(read)
        middle_fd = os.pidfd_open(os.getpid())
        (enter or _new_user_and_pid)()
        pid = os.fork()
        if pid:
            os.write(write, b"pid %d" % pid)
            os._exit(0)
    except BaseException as e:
        os.write(write, f"error {e}".encode())
        os._exit(1)
    os.close(write)
    # Only once the middle process has ended for good is the caller our parent; asking before that to die with the parent would
    # mean the middle process. A pidfd becomes readable after children have been handed on, a closed pipe before.
    select.select([middle_fd], [], [])
    os.close(middle_fd)
    return 0


def _new_user_and_pid() -> None:
    new_user_namespace()
    calls.unshare(calls.CLONE_NEWPID)


def new_user_namespace(proc: int | None = None) -> None:
    """Become privileged over namespaces of our own, under our own user and group id. Raises: OSError where not allowed.

    ``proc``: a descriptor of a proc file system, where the one at /proc cannot be written.
    """
    uid, gid = os.geteuid(), os.getegid()
    calls.unshare(calls.CLONE_NEWUSER)
    for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        fd = os.open(f"/proc/self/{file}" if proc is None else f"self/{file}", os.O_WRONLY, dir_fd=proc)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def enter_as_loader(spec: IsolationSpec) -> None:
    """Put this process into namespaces of its own whose owner it is, so that it may make more, and nothing outside them.

    The caller goes on in a child, process 1 of a new pid namespace; its former self stays behind, waits, and ends as the
    child does. When the process above that is gone, the child has half a minute to end by itself.
    """
    new_user_namespace()
    calls.unshare(calls.CLONE_NEWPID)
    above = os.getppid()
    parent = os.pidfd_open(os.getpid())
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    child = os.fork()
    if child:
        _stand_in_for(child, above)
    signal.pthread_sigmask(signal.SIG_SETMASK, usual)
    _die_with(parent)
    os.close(parent)
    network = calls.CLONE_NEWNET if spec.network != "host" else 0
    calls.unshare(_PER_SESSION | network)
    calls.sethostname(spec.hostname)
    if spec.network == "loopback":
        bring_up_loopback()


def lock_mounts(proc: int) -> None:
    """Step into a further user namespace, in which nothing about the mounts that are there now can be taken back.

    ``proc``: a descriptor of a proc file system that can be written.
    """
    new_user_namespace(proc)
    calls.unshare(calls.CLONE_NEWNS)


def _die_with(parent: int) -> None:
    """Be killed with the parent, also when it was already gone before the request could be made."""
    calls.prctl(calls.PR_SET_PDEATHSIG, signal.SIGKILL, what="parent death signal")
    if select.select([parent], [], [], 0)[0]:
        os._exit(1)


def enter(spec: IsolationSpec) -> None:
    """Put this process into namespaces of its own, all but the file system view. Raises: OSError."""
    if os.getpid() != 1 or not calls.has_sys_admin():
        if not calls.has_sys_admin():
            new_user_namespace()
        calls.unshare(calls.CLONE_NEWPID)
        _split(spec)
    network = calls.CLONE_NEWNET if spec.network != "host" else 0
    calls.unshare(_PER_SESSION | network)
    calls.sethostname(spec.hostname)
    if spec.network == "loopback":
        bring_up_loopback()


def _split(spec: IsolationSpec) -> None:
    parent = os.pidfd_open(os.getpid())
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    child = os.fork()
    if child:
        _stand_in_for(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, usual)
    if spec.die_with_parent:
        _die_with(parent)
    os.close(parent)


def _stand_in_for(child: int, above: int | None = None) -> None:
    """Stay behind as the pid the launcher knows. Never returns. ``above``: whose end gives the child half a minute.

    Signals are waited for, not handled: they are blocked since before the fork, so none comes too early or between two looks.
    """
    acts: dict[int, Callable[[], object]] = {}
    for number in _PASSED_ON:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
            acts[number] = functools.partial(os.kill, child, number)
    if above is not None:
        acts[signal.SIGHUP] = lambda: signal.alarm(_ORPHAN_GRACE_S)
        acts[signal.SIGALRM] = lambda: os.kill(child, signal.SIGKILL)
        calls.prctl(calls.PR_SET_PDEATHSIG, signal.SIGHUP, what="parent death signal")
        if os.getppid() != above:
            signal.alarm(_ORPHAN_GRACE_S)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_FOR - acts.keys() - {signal.SIGCHLD})
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    ended = 0
    while not ended:
        came = signal.sigwait({signal.SIGCHLD, *acts})
        if came in acts:
            acts[came]()
        ended, status = os.waitpid(child, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def bring_up_loopback() -> None:
    """A new network namespace has its loopback interface switched off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16xH14x", fcntl.ioctl(s, _SIOCGIFFLAGS, request))[0]
        fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def fork_into(pid: int, before: Callable[[], object]) -> int:
    """Fork a child into the namespaces of the running session ``pid``. Returns like ``os.fork()``; the child runs beside it.

    ``before`` runs in the child-to-be while it still sees the host.
    """
    target = os.pidfd_open(pid)

    def join() -> None:
        before()
        # Only those that differ: joining one's own is refused where it belongs to somebody more privileged.
        flags = 0
        for name, flag in _JOINED.items():
            if os.stat(f"/proc/{pid}/ns/{name}").st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
                flags |= flag
        calls.setns(target, flags)

    try:
        return _fork_through_middle(join)
    finally:
        os.close(target)

"""Who sends on a connection: this machine's user, a session, or somebody else.

Theory of operation. Whoever may deploy ``local://`` files runs code as this user, and whoever may run commands in sessions,
read logs or stop them rules over all of them. A session must do none of it to another, and unmodified AWS clients of this
machine must need no secret for it. So the kernel is asked who holds the other end of the connection, once per connection. The
answer has to be a process that is positively known and no session: an end that nobody is seen to hold (closed at once, sent on
through a socket, on another machine) is no user's, because a session could make it look like that. No user's are

- connections that this process carries for sessions without a network (its relays know for which);
- processes below this one. Where the process, or one above it, is the first of a session, the connection is that session's;
- processes that have given up gaining privileges (``no_new_privs``), as sessions of every runtime of this machine have, under
  every tier that confines; not where this process runs like that itself;
- processes that were started with a runtime's mark in their environment, or below such a one;
- other users' processes, but for root's.

What it costs. One question over netlink gives the other end's user and inode. Processes that held a connection before are looked
at first, so that only the first connection of a client waits for a search through the machine's processes; all connections
that wait then share one search, which runs in a thread.

With credentials a signature is asked for instead. Elsewhere than on Linux, where no tier confines, loopback is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from .peers import owner_of
from .procfs import parent, status

log = logging.getLogger(__name__)
Address = tuple[str, int]
Owner = tuple[int, str]  # of a carried connection: the process that handed it over, and what it says its name is
REMEMBERED_HOLDERS = 16
LIKELY = 4
_NO_HOLDER = "sessions (no other process holds the connection)"
PEER = "agentcore_rl.peer"  # in an ASGI scope: the `Peer` of its connection


class Session(Protocol):
    """What is asked of a session: its first process (``pid``, ``command_pids``; None before there is one), and its folder."""

    @property
    def process(self) -> Any: ...

    @property
    def directory(self) -> Path: ...


S = TypeVar("S", bound=Session)


@dataclass(frozen=True, slots=True)
class Caller(Generic[S]):
    """Who sends. ``reason`` None: this machine's user; else in words who it is instead.

    ``session``: the session of this runtime that it is. ``confined``: it is a session, known or not; otherwise a stranger.
    """

    reason: str | None = None
    session: S | None = None
    confined: bool = False

    @property
    def is_user(self) -> bool:
        return self.reason is None


USER: Caller[Any] = Caller()


def _stranger(reason: str) -> Caller[Any]:
    return Caller(reason)


def _confined(reason: str) -> Caller[Any]:
    return Caller(reason, confined=True)


@dataclass(slots=True)
class Peer:
    """The other end of a connection. ``caller``: who that is, once somebody has asked."""

    caller: Any = None


@dataclass(slots=True)
class _Holder:
    """A user's process that held a connection. ``descriptor`` stands for it; ``last`` is the number of what it held."""

    pid: int
    descriptor: int
    last: int = 0

    def holds(self, inode: int) -> bool:
        """Whether it holds this socket. A client's next connection mostly has one of the next numbers."""
        wanted = f"socket:[{inode}]"
        for number in range(self.last, self.last + LIKELY):
            if _file(self.pid, number) == wanted:
                self.last = number
                return True
        for name in _descriptors(self.pid):
            if _file(self.pid, name) == wanted:
                self.last = int(name)
                return True
        return False


class Callers(Generic[S]):
    """Answers who sends on a connection, and remembers whom it found.

    ``sessions``: the live ones of this machine. ``carried``: for a connection's two ends, whose it is where a relay of this
    process carries it. ``mark``: the variable that stands in the environment of every process that a runtime starts.
    """

    def __init__(
        self,
        sessions: Callable[[], Iterable[S]],
        carried: Callable[[Address, Address], Owner | None] = lambda client, server: None,
        *,
        mark: str | None = None,
    ) -> None:
        self._sessions = sessions
        self._carried = carried
        self._mark = None if mark is None else mark.encode() + b"="
        self._holders: OrderedDict[int, _Holder] = OrderedDict()  # users' processes, by id; last used last
        self._wanted: dict[int, asyncio.Future[int | None]] = {}  # inodes that wait for the next search
        self._searching: asyncio.Task[None] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def known(self, client: Address | None, server: Address | None) -> Caller[S] | None:
        """Who sends, where that is known without a search (some 50 microseconds); else None."""
        found = self._first_look(client, server)
        return found if isinstance(found, Caller) else None

    async def ask(self, client: Address | None, server: Address | None) -> Caller[S]:
        """Who sends. The first time it searches the machine's processes, which takes some milliseconds."""
        found = self._first_look(client, server)
        if isinstance(found, Caller):
            return found
        return self._judge(await self._search_for(found))

    async def of_scope(self, scope: Mapping[str, Any]) -> Caller[S]:
        """Who sends the request of an ASGI scope; asked once for its connection."""
        peer: Peer = scope.get(PEER) or Peer()
        if peer.caller is None:
            peer.caller = await self.ask(scope["client"], scope["server"])
        caller: Caller[S] = peer.caller
        return caller

    def close(self) -> None:
        """Let go of what is remembered."""
        for holder in self._holders.values():
            os.close(holder.descriptor)
        self._holders.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def session_of(self, pid: int) -> S | None:
        """The session that a process of this machine belongs to."""
        firsts: dict[int, S] = {}
        for session in self._sessions():
            process = session.process
            for first in (getattr(process, "pid", None), *getattr(process, "command_pids", ())):
                if first:
                    firsts[first] = session
        return owner_of(pid, firsts)

    # -- looking
    def _first_look(self, client: Address | None, server: Address | None) -> Caller[S] | int:
        """Who sends, or the inode of the socket whose holder is not known."""
        owner = None if client is None or server is None else self._carried(client, server)
        if owner is not None:
            return self._carried_for(owner)
        found = _user_at(client, server)
        if isinstance(found, str):
            return _stranger(found)
        user, inode = found
        if user != os.getuid() or not sys.platform.startswith("linux"):
            return USER
        for pid in list(reversed(self._holders)):
            if self._holders[pid].holds(inode) and self._still_there(pid):
                self._holders.move_to_end(pid)
                return USER
        return inode

    def _carried_for(self, owner: Owner) -> Caller[S]:
        pid, name = owner
        if pid == os.getpid():  # a container's: the runtime handed it over, and says whose it is
            session = next((s for s in self._sessions() if s.directory.name == name), None)
        else:
            session = self.session_of(pid)
        return self._is_session(session)

    def _is_session(self, session: S | None) -> Caller[S]:
        if session is None:
            return _confined("sessions, and what they leave behind")
        return Caller("sessions", session, confined=True)

    def _still_there(self, pid: int) -> bool:
        """Whether it is the process that was found once, and no later one with its number."""
        try:
            signal.pidfd_send_signal(self._holders[pid].descriptor, 0)  # type: ignore[attr-defined,unused-ignore]  # Linux
        except OSError:
            os.close(self._holders.pop(pid).descriptor)
            return False
        return True

    async def _search_for(self, inode: int) -> int | None:
        loop = asyncio.get_running_loop()
        future = self._wanted.setdefault(inode, loop.create_future())
        if self._searching is None:
            self._searching = loop.create_task(self._search())
        return await asyncio.shield(future)

    async def _search(self) -> None:
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="callers")
        try:
            while self._wanted:
                wanted, self._wanted = self._wanted, {}
                found: Mapping[int, int] = {}
                try:
                    late = frozenset(pid for s in self._sessions() if (pid := getattr(s.process, "pid", None)))
                    found = await loop.run_in_executor(self._thread, _holders_of, set(wanted), late)
                except Exception:  # a holder that could not be looked for is nobody's, and its caller is refused
                    log.exception("who sends on %d connections could not be found out", len(wanted))
                for inode, future in wanted.items():
                    if not future.done():
                        future.set_result(found.get(inode))
        finally:
            self._searching = None

    def _judge(self, pid: int | None) -> Caller[S]:
        own = os.getpid()
        if pid is None:
            return _confined(_NO_HOLDER)
        if pid == own:  # and none of its relays carries it: this program's own call
            return USER
        if _below(pid, own):
            return self._is_session(self.session_of(pid))
        if (_may_not_gain(pid) and not _may_not_gain(own)) or (self._marked(pid) and not self._marked(own)):
            return _confined(f"sessions (process {pid} is confined)")
        self._remember(pid)
        return USER

    def _remember(self, pid: int) -> None:
        if pid not in self._holders:
            with contextlib.suppress(OSError):
                self._holders[pid] = _Holder(pid, os.pidfd_open(pid))
            while len(self._holders) > REMEMBERED_HOLDERS:
                os.close(self._holders.popitem(last=False)[1].descriptor)

    def _marked(self, pid: int) -> bool:
        """Whether it, or a process above it, was started by a runtime."""
        while self._mark is not None and pid > 1:
            try:
                with open(f"/proc/{pid}/environ", "rb") as f:
                    if any(entry.startswith(self._mark) for entry in f.read().split(b"\0")):
                        return True
            except OSError:  # another user's, or gone
                return False
            pid = parent(pid)
        return False


def stranger(client: Address | None, server: Address | None) -> str | None:
    """In words who sends, where it is neither this user nor root; None where it is. Sees no sessions. Blocks for some 50
    microseconds.
    """
    found = _user_at(client, server)
    return found if isinstance(found, str) else None


def _user_at(client: Address | None, server: Address | None) -> tuple[int, int] | str:
    """This user or root, and the inode of the caller's socket (0 elsewhere than on Linux); else in words who it is."""
    if client is None or server is None:
        return "callers without an address"
    if not sys.platform.startswith("linux"):
        return (os.getuid(), 0) if ipaddress.ip_address(client[0]).is_loopback else "other machines"
    found = _other_end(client, server)
    if found is None:
        return "other machines, network namespaces and connections that were closed at once"
    return found if found[0] in (0, os.getuid()) else "other users of this machine"


def _other_end(client: Address, server: Address) -> tuple[int, int] | None:
    """User and inode of the caller's socket, when it is one of this network namespace and open."""
    return _ask_for(client, server) or _look_for(client, server)


_QUESTION = struct.Struct("=IHHII BBBxI")  # nlmsghdr, then inet_diag_req_v2 up to its addresses
_ENDS = struct.Struct("!HH16s16s")
_ANSWER = struct.Struct("=BB2x4x32x12x12xII")  # inet_diag_msg: family, state, ..., user, inode
_BY_FAMILY, _REQUEST, _LISTENING = 20, 1, 10


def _ask_for(client: Address, server: Address) -> tuple[int, int] | None:
    """Ask the kernel for one socket; None when it does not answer, or has none.

    Source: sock_diag(7). The tables in /proc hold all sockets of the machine and take milliseconds to write.
    """
    ends = [_ip(address) for address in (client, server)]
    family = socket.AF_INET if ends[0].version == 4 else socket.AF_INET6
    packed = (ip.packed.ljust(16, b"\0") for ip in ends)
    body = _ENDS.pack(client[1], server[1], *packed) + struct.pack("=III", 0, 2**32 - 1, 2**32 - 1)
    head = _QUESTION.pack(
        _QUESTION.size + len(body), _BY_FAMILY, _REQUEST, 1, 0, family, socket.IPPROTO_TCP, 0, 2**32 - 1
    )
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as netlink:  # NETLINK_SOCK_DIAG
            netlink.settimeout(1.0)
            netlink.send(head + body)
            answer = netlink.recv(4096)
    except OSError:
        return None
    if len(answer) < 16 + _ANSWER.size or struct.unpack_from("=IH", answer)[1] != _BY_FAMILY:
        return None
    _, state, user, inode = _ANSWER.unpack_from(answer, 16)
    return (user, inode) if inode and state != _LISTENING else None


def _look_for(client: Address, server: Address) -> tuple[int, int] | None:
    local, remote = _names(client), _names(server)
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}") as lines:
                for line in lines:
                    words = line.split(maxsplit=10)
                    if words[1] in local and words[2] in remote and words[9] != "0":
                        return int(words[7]), int(words[9])
        except OSError:
            continue  # no IPv6
    return None


def _ip(address: Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """IPv4 also where it came over an IPv6 socket."""
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip


def _names(address: Address) -> tuple[str, ...]:
    """An address as the kernel's tables write it: words of the machine's byte order in hexadecimal."""
    ip = _ip(address)
    packed = [ip.packed]
    if ip.version == 4:
        packed.append(b"\0" * 10 + b"\xff\xff" + ip.packed)  # over an IPv6 socket
    return tuple(
        "".join(f"{word:08X}" for word in struct.unpack(f"={len(raw) // 4}I", raw)) + f":{address[1]:04X}"
        for raw in packed
    )


def _holders_of(inodes: set[int], late: Collection[int]) -> dict[int, int]:
    """For each socket a process that holds it, newest processes first, those of ``late`` last."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, int] = {}
    pids = sorted(_processes(), reverse=True)
    for pid in (*(p for p in pids if p not in late), *(p for p in pids if p in late)):
        for number in _descriptors(pid):
            inode = wanted.pop(_file(pid, number), None)
            if inode is not None:
                found[inode] = pid
        if not wanted:
            break
    return found


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _below(pid: int, top: int) -> bool:
    """Whether a process descends from another; one that ends meanwhile counts as such."""
    while pid > 1:
        if pid == top:
            return True
        above = parent(pid)
        if above == 0 and not _is_there(pid):
            return True
        pid = above
    return False


def _is_there(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _descriptors(pid: int) -> Iterator[str]:
    """The numbers of what it holds open, the last one first: a connection that has just been made has a high one."""
    try:
        return reversed(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return iter(())


def _file(pid: int, number: int | str) -> str:
    """What one of its descriptors stands for; empty when there is none."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return ""


def _may_not_gain(pid: int) -> bool:
    """Whether it has given up gaining privileges; so has one that is gone, of which nothing is known."""
    return status(pid, "NoNewPrivs") in (["1"], None)

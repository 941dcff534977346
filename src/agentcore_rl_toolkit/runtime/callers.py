"""Who sent a request: sessions may use the runtime, but not manage the runtime that runs them.

Theory of operation. Whoever may deploy ``local://`` files runs code as this user, and whoever may read logs or stop
sessions rules over all of them. A session must do neither, and unmodified AWS clients of this machine must need no secret for
it. So the kernel is asked who holds the other end of the connection. The answer has to be a process that is positively known
and no session: an end that nobody is seen to hold (closed at once, sent on through a socket, on another machine) is refused,
because a session could make it look like that. Refused are

- this process itself (it carries the connections of sessions without a network) and everything below it;
- processes that have given up gaining privileges (``no_new_privs``), as sessions of every runtime of this machine have, under
  every tier that confines; not where this process runs like that itself;
- other users' processes, but for root's.

With ``--credential`` a signature is asked for instead. Elsewhere than on Linux, where no tier confines, loopback is enough.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator

from .wire import WireError

Address = tuple[str, int]
_HOW = "start the runtime with --credential KEY:SECRET and sign the request"


def refuse_sessions(client: Address | None, server: Address | None, sessions: Collection[int | None] = ()) -> None:
    """Let a request of this machine's user pass. ``sessions``: processes that need not be looked at, to save the time.

    Blocks for some milliseconds. Raises: WireError 403 with the reason.
    """
    reason = _why_not(client, server, sessions)
    if reason is not None:
        raise WireError("AccessDeniedException", f"Managing this runtime is not open to {reason}; {_HOW}.")


def _why_not(client: Address | None, server: Address | None, sessions: Collection[int | None]) -> str | None:
    if client is None or server is None:
        return "callers without an address"
    if not sys.platform.startswith("linux"):
        return None if ipaddress.ip_address(client[0]).is_loopback else "other machines"
    found = _other_end(client, server)
    if found is None:
        return "other machines, network namespaces and connections that were closed at once"
    user, inode = found
    if user != os.getuid():
        return None if user == 0 else "other users of this machine"
    holder = _holder(inode, sessions)
    if holder is None:
        return "sessions (no other process holds the connection)"
    if _may_not_gain(holder) and not _may_not_gain(os.getpid()):
        return f"sessions (process {holder} is confined)"
    return None


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


_last_holder = 0  # programs that watch ask again and again


def _holder(inode: int, sessions: Collection[int | None]) -> int | None:
    """A process that holds the socket and is neither this one nor below it."""
    global _last_holder
    own, wanted = os.getpid(), f"socket:[{inode}]"
    for pid in itertools.chain((_last_holder,), _processes()):
        if pid != own and pid not in sessions and wanted in _open_files(pid) and not _below(pid, own):
            _last_holder = pid
            return pid
    return None


def _processes() -> Iterator[int]:
    for name in os.listdir("/proc"):  # when the first is asked for
        if name.isdigit():
            yield int(name)


def _below(pid: int, top: int) -> bool:
    """Whether a process descends from another; one that ends meanwhile counts as such."""
    while pid > 0:
        if pid == top:
            return True
        try:
            with open(f"/proc/{pid}/stat", "rb") as f:
                pid = int(f.read().rpartition(b")")[2].split()[1])
        except OSError:
            return True
    return False


def _open_files(pid: int) -> Iterator[str]:
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                yield os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
    except OSError:
        return


def _may_not_gain(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as lines:
            return any(line.split() == ["NoNewPrivs:", "1"] for line in lines)
    except OSError:
        return True  # gone: nothing is known of it

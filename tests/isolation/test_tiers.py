"""Choosing a tier, the reports, the spec, control groups and finding a container engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.isolation import IsolationSpec, Limits, available_tiers, choose_tier
from agentcore_rl_toolkit.isolation.engines import find_engine, split_url
from agentcore_rl_toolkit.isolation.linux import cgroups, landlock, seccomp
from agentcore_rl_toolkit.isolation.tiers import TIERS

from .conftest import linux_only


def test_reports_name_every_tier_and_what_it_leaves_open() -> None:
    reports = {r.name: r for r in available_tiers()}
    assert list(reports) == ["namespaces", "landlock", "process", "docker", "gvisor"]
    for report in reports.values():
        assert report.leaves_open
        assert report.available == (report.unavailable is None)
    assert reports["process"].available


def test_auto_takes_the_strongest_that_holds_the_network() -> None:
    strongest = next(r.name for r in available_tiers() if r.available)
    assert choose_tier("auto").name == strongest


def test_a_named_tier_is_never_replaced_by_another() -> None:
    with pytest.raises(ConfigError, match="must be auto, namespaces"):
        choose_tier("jail")
    with pytest.raises(ConfigError, match="'process' cannot hold network='none'"):
        choose_tier("process", network="none")
    for report in available_tiers():
        if not report.available:
            with pytest.raises(ConfigError, match="is not available here"):
                choose_tier(report.name)


def test_elsewhere_only_the_process_tier_is_claimed() -> None:
    """What a Mac would see: the modules import and choose without any Linux call."""
    code = (
        "import sys; sys.platform = 'darwin'\n"
        "from agentcore_rl_toolkit.isolation import available_tiers, choose_tier\n"
        "print([r.name for r in available_tiers() if r.available and r.name not in ('docker', 'gvisor')], choose_tier().name)\n"
        "print(sorted(choose_tier().describe().limits))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "['process'] process\n['file_bytes', 'open_files', 'processes']\n", done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        {"session_dir": Path("relative")},
        {"session_dir": Path("/s/a"), "hidden": (Path("relative"),)},
        {"session_dir": Path("/s/a"), "network": "vpn"},
        {"session_dir": Path("/s/a"), "endpoints": ("example.com:80",)},
        {"session_dir": Path("/s/a"), "endpoints": ("127.0.0.1:0",)},
        {"session_dir": Path("/s/a"), "name": "a/b"},
    ],
)
def test_wrong_specs_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        IsolationSpec(**wrong)  # type: ignore[arg-type]


def test_limits_are_positive() -> None:
    with pytest.raises(ConfigError):
        Limits(memory_bytes=0)


def test_a_readable_folder_of_sessions_is_refused() -> None:
    spec = IsolationSpec(session_dir=Path("/srv/sessions/a"), read_only=(Path("/srv/sessions"),))
    with pytest.raises(ConfigError, match="folder of their own"):
        _ = spec.hidden_paths


def test_landlock_leaves_hidden_places_out(tmp_path: Path) -> None:
    for name in ("a/x", "a/y/z", "b"):
        (tmp_path / name).mkdir(parents=True)
    kept = landlock.without(tmp_path, [tmp_path / "a" / "y"])
    assert kept == [tmp_path / "a" / "x", tmp_path / "b"]
    assert landlock.without(tmp_path, [tmp_path]) == []
    assert landlock.without(tmp_path, [tmp_path.parent / "other"]) == [tmp_path]


# --- control groups ----------------------------------------------------------------------------------------------------------

V1 = [
    "30 29 0:26 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct",
    "31 29 0:27 / {root} rw,relatime shared:9 - cgroup cgroup rw,memory",
    "32 29 0:28 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw",
]


def test_v1_groups_go_below_our_own(tmp_path: Path) -> None:
    (tmp_path / "box" / "own").mkdir(parents=True)
    mounts = [V1[1].format(root=tmp_path)]
    found = cgroups.find(mounts, ["4:memory:/box/own", "0::/"])
    assert found is not None
    assert (found.version, found.parents) == (1, {"memory": tmp_path / "box" / "own" / "agentcore-rl"})


def test_a_mount_of_a_part_of_the_hierarchy_is_understood(tmp_path: Path) -> None:
    """Inside a container the mount's root is the container's group, and /proc/self/cgroup names it in full."""
    line = f"31 29 0:27 /docker/abc {tmp_path} rw,relatime - cgroup cgroup rw,memory"
    found = cgroups.find([line], ["4:memory:/docker/abc"])
    assert found is not None
    assert found.parents == {"memory": tmp_path / "agentcore-rl"}


def test_a_delegated_v2_group_is_split_before_use(tmp_path: Path) -> None:
    """Over plain files in the place of the kernel's: what would be written where. Not run on a real v2 delegation."""
    own = tmp_path / "user.slice" / "app.scope"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpu memory pids io\n")
    (own / "cgroup.procs").write_text("41\n42\n")
    line = f"32 29 0:28 / {tmp_path} rw,relatime shared:9 - cgroup2 cgroup2 rw"
    found = cgroups.find([line], ["0::/user.slice/app.scope"])
    assert found is not None
    assert found.version == 2
    assert set(found.parents.values()) == {own / "agentcore-rl"}
    assert found.controllers == {"cpu", "memory", "pids"}
    assert (own / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (own / "agentcore-rl" / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (own / "agentcore-rl-server" / "cgroup.procs").read_text() == "42"


def test_a_v2_group_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    line = f"32 29 0:28 / {tmp_path} rw,relatime shared:9 - cgroup2 cgroup2 rw"
    assert cgroups.find([line], ["0::/"]) is None
    assert not (tmp_path / "agentcore-rl").exists()


def test_settings_per_version() -> None:
    limits = Limits(memory_bytes=1 << 20, cpus=1.5, processes=9)
    assert cgroups.settings(1, limits) == {
        "memory": [("memory.limit_in_bytes", "1048576"), ("memory.memsw.limit_in_bytes", "1048576")],
        "pids": [("pids.max", "9")],
        "cpu": [("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "150000")],
    }
    assert cgroups.settings(2, limits)["cpu"] == [("cpu.max", "150000 100000")]
    assert cgroups.settings(2, Limits()) == {}


@linux_only
def test_groups_are_removed_with_their_session_and_kills_are_counted(folder: Path) -> None:
    where = cgroups.detect()
    if where is None or "memory" not in where.controllers:
        pytest.skip("no control group for memory is usable here")
    name = f"test-{os.getpid()}-oom"
    pid = os.fork()
    if pid == 0:
        try:
            cgroups.attach(name, Limits(memory_bytes=64 << 20))
            _ = [bytearray(b"x") * (16 << 20) for _ in range(16)]
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -9
    assert cgroups.out_of_memory_kills(name) == 1
    assert cgroups.remove(name)
    assert not any(directory.exists() for directory in where.directories(name))
    assert cgroups.remove(name)


@linux_only
def test_groups_that_a_killed_launcher_left_are_swept(tmp_path: Path) -> None:
    parent = tmp_path / "agentcore-rl"
    for name, age_s in (("old", 3600.0), ("joining", 0.0), ("busy", 3600.0)):
        (parent / name).mkdir(parents=True)
        if name == "busy":
            (parent / name / "child").touch()  # a directory that cannot be removed, as a group with processes cannot
        os.utime(parent / name, (time.time() - age_s,) * 2)
    where = cgroups.Hierarchy(version=1, parents={"memory": parent, "pids": parent})
    assert cgroups.sweep(where) == 1
    assert sorted(p.name for p in parent.iterdir()) == ["busy", "joining"]


# --- containers --------------------------------------------------------------------------------------------------------------


def test_container_tiers_are_not_for_launchers_that_fork() -> None:
    spec = IsolationSpec(session_dir=Path("/s/a"))
    for name in ("docker", "gvisor"):
        for use in (lambda t: t.fork(spec), lambda t: t.confine_child(spec)):
            with pytest.raises(ConfigError, match=f"--isolation {name}"):
                use(TIERS[name])


def test_an_engine_is_found_by_docker_host_and_named_by_what_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"Components": [{"Name": "Podman Engine"}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever).start()
        url = f"tcp://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("DOCKER_HOST", url)
        assert (find_engine().name, find_engine().url) == ("podman", url)
        monkeypatch.setenv("PATH", str(tmp_path))
        if not Path("/var/run/docker.sock").exists():
            with pytest.raises(ConfigError, match="it is podman"):
                find_engine("docker")
        server.shutdown()


@pytest.mark.parametrize("url", ["ssh://host", "tcp://host", "npipe://x"])
def test_addresses_that_cannot_be_spoken_to_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="unix:///path or tcp"):
        split_url(url)


def test_landlock_lists_what_it_cannot_hold() -> None:
    report = next(r for r in available_tiers() if r.name == "landlock")
    if report.unavailable is not None:
        pytest.skip(report.unavailable)
    left = " ".join(report.leaves_open)
    for what in ("mode, times, group and extended attributes", "priority, scheduling and CPU affinity", "System V"):
        assert what in left
    assert any("prlimit" in what for what in (report.stops if seccomp.available() else report.leaves_open))

"""Keys that servers make for themselves: who finds them, and who does not."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agentcore_rl_toolkit._servers import keys
from agentcore_rl_toolkit.errors import ConfigError

URL = "http://127.0.0.1:8090"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"agentcore-rl-keys-{os.getuid()}"


def test_a_key_is_found_under_every_loopback_address_of_its_port() -> None:
    key = keys.make()
    assert len(key) == 32
    keys.leave("gateway", URL, key)
    for url in (URL, URL + "/", "http://localhost:8090", "http://[::1]:8090/v1", "http://0.0.0.0:8090"):
        assert keys.find("gateway", url) == key
    for kind, url in (
        ("policy", URL),
        ("gateway", "http://127.0.0.1:8091"),
        ("gateway", "http://10.0.0.1:8090"),
        ("gateway", "http://gateway.example:8090"),
        ("gateway", "http://[half"),
    ):
        assert keys.find(kind, url) is None


@pytest.mark.parametrize(("url", "port"), [("http://127.0.0.1", 80), ("https://localhost/", 443), (URL, 8090)])
def test_a_url_without_a_port_has_that_of_its_scheme(url: str, port: int, folder: Path) -> None:
    assert keys.leave("gateway", url, "k") == folder / f"gateway-{port}"


def test_nobody_else_can_read_it_and_what_others_can_write_is_not_believed(folder: Path) -> None:
    old = os.umask(0)
    try:
        path = keys.leave("gateway", URL, "k")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=f"^the key file {path} cannot be written: Is a directory$"):
        keys.leave("gateway", URL, "k")
    folder.chmod(0o777)
    assert keys.find("gateway", URL) is None
    with pytest.raises(ConfigError, match="TMPDIR"):
        keys.leave("gateway", URL, "k")


def test_the_key_of_a_server_that_was_killed_is_not_sent() -> None:
    path = keys.leave("gateway", URL, "k")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path.write_text(json.dumps({"key": "k", "pid": gone.pid}))
    assert keys.find("gateway", URL) is None
    keys.forget(path)
    assert path.exists()  # another server's
    path = keys.leave("gateway", URL, "new")
    assert keys.find("gateway", URL) == "new"
    keys.forget(path)
    assert not path.exists()


def test_a_server_that_is_not_on_loopback_leaves_none() -> None:
    assert keys.is_here("127.0.0.1")
    assert keys.is_here("0.0.0.0")
    assert not keys.is_here("10.0.0.1")
    assert not keys.is_here("gateway.example")
    with pytest.raises(ConfigError, match="given"):
        keys.leave("gateway", "http://10.0.0.1:1", "k")

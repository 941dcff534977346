"""The AWS CLI against the endpoint, where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import ACCESS, SECRET, Server

AWS = shutil.which("aws")
pytestmark = pytest.mark.skipif(AWS is None, reason="the AWS CLI is not installed")


def aws(url: str, *arguments: str) -> str:
    env = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_MAX_ATTEMPTS": "1",
    }
    done = subprocess.run([AWS or "", *arguments], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_usual_commands(start_server: Callable[..., Server], tmp_path: Path) -> None:
    url = start_server(credential=f"{ACCESS}:{SECRET}").url
    folder = tmp_path / "tree"
    (folder / "sub").mkdir(parents=True)
    (folder / "a b.txt").write_text("one")
    (folder / "sub" / "é.bin").write_bytes(b"x" * (9 * 2**20))
    aws(url, "s3", "mb", "s3://cli-bucket")
    aws(url, "s3", "sync", str(folder), "s3://cli-bucket/up")
    assert "sub/é.bin" in aws(url, "s3", "ls", "--recursive", "s3://cli-bucket/")
    aws(url, "s3", "cp", "s3://cli-bucket/up/sub/é.bin", str(tmp_path / "down"))
    assert (tmp_path / "down").read_bytes() == b"x" * (9 * 2**20)
    aws(url, "s3", "mv", "s3://cli-bucket/up/a b.txt", "s3://cli-bucket/moved")
    assert '"Key": "moved"' in aws(url, "s3api", "list-objects-v2", "--bucket", "cli-bucket")
    aws(url, "s3", "rb", "--force", "s3://cli-bucket")
    assert aws(url, "s3", "ls") == ""

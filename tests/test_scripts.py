"""The shell scripts that the documentation names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PUSH = ROOT / "scripts" / "build_docker_image_and_push_to_ecr.sh"


def push(folder: Path, *options: str, **settings: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("AWS_REGION", "AWS_ACCOUNT", "ECR_REPO_NAME")}
    return subprocess.run(
        ["sh", str(PUSH), *options],
        cwd=folder,
        env={**clean, **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_an_image_is_built_and_pushed_with_the_settings_of_env(tmp_path: Path) -> None:
    (tmp_path / "Docker file").write_text("FROM scratch\n")
    (tmp_path / ".env").write_text(
        'AWS_REGION=eu-west-1\nexport AWS_ACCOUNT="123456789012"\nECR_REPO_NAME=$(touch ran)my-agent\n'
    )
    done = push(tmp_path, "--dockerfile=Docker file", "--tag=v1", "--context=a b", "--dry-run", ECR_REPO_NAME="mine")
    assert done.returncode == 0, done.stderr
    image = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/mine:v1"
    assert f"--file Docker file --tag {image} a b" in done.stdout
    assert done.stdout.splitlines()[-1] == image
    # what .env holds is read, not run
    done = push(tmp_path, "--dockerfile=Docker file", "--tag=v1", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck (apt-get install shellcheck)")
def test_scripts_pass_shellcheck() -> None:
    scripts = sorted((ROOT / "scripts").glob("*.sh"))
    done = subprocess.run(["shellcheck", *map(str, scripts)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout


def test_a_rollout_passes_through_few_files_of_the_client_and_never_back_and_forth() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "trace_rollout.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr
    assert "files (9 allowed)" in done.stdout


def test_every_script_prints_its_help() -> None:
    folders = ("examples", "scripts", "benchmarks")
    programs = [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not (path.parent / "__init__.py").exists()  # run with -m
        and "ArgumentParser(" in (text := path.read_text())
        and '__name__ == "__main__"' in text
    ]
    assert len(programs) > 25
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "helps.py"), *map(str, programs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert done.stdout.count("usage: ") + done.stdout.count("is not installed") == len(programs)
    assert done.stdout.count("usage: ") > 25

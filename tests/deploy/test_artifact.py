"""What an image and an archive are called, and what is in the folder they are made of."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

from agentcore_rl_toolkit.deploy import artifact
from agentcore_rl_toolkit.deploy.artifact import (
    ImageBuilder,
    digest_of,
    files_of,
    image_digest,
    make_archive,
    put_wheel_beside,
    requirements_of,
    this_platform,
)
from agentcore_rl_toolkit.deploy.score_ready import STARTER, derive
from agentcore_rl_toolkit.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text("app = 1\n")
    (tmp_path / "Dockerfile").write_text("FROM python\nCOPY wheels/ wheels/\nRUN pip install wheels/*.whl\n")
    return tmp_path


def test_an_image_has_the_same_name_before_and_after_its_wheel_lies_there(folder: Path) -> None:
    before = image_digest(folder, "linux/arm64")
    put_wheel_beside(folder)
    [wheel] = (folder / "wheels").iterdir()
    assert wheel.name.startswith("agentcore_rl_toolkit-")
    assert image_digest(folder, "linux/arm64") == before
    (folder / "agent.py").write_text("app = 2\n")
    assert image_digest(folder, "linux/arm64") != before


def test_an_image_has_another_name_when_a_file_became_executable(folder: Path) -> None:
    before = image_digest(folder, "linux/arm64")
    (folder / "agent.py").chmod(0o755)
    assert image_digest(folder, "linux/arm64") != before


def test_requirements_stay_as_they_are_without_the_toolkit(folder: Path) -> None:
    lines = [
        "kit @ git+https://example.com/kit.git#subdirectory=python  # why",
        "-r https://example.com/more.txt",
        "agentcore-rl-toolkit-extra",
    ]
    ours = ["agentcore-rl-toolkit[client]==0.2", "./wheels/agentcore_rl_toolkit-0.2.0-py3-none-any.whl"]
    (folder / "requirements.txt").write_text("\n".join([*ours, *lines]))
    assert requirements_of(folder) == lines


@pytest.mark.parametrize("first", ["exec sleep 600", "exit 1"])
def test_an_engine_that_does_not_answer_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    for name, text in {"docker": first, "podman": "exit 0"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(artifact, "ANSWER_S", 0.5)
    assert ImageBuilder.find().command == str(tmp_path / "podman")
    (tmp_path / "podman").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigError, match="neither Docker nor Podman answers here"):
        ImageBuilder.find()


ENGINE = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$*" in
    *json*) [ -f {folder}/pulled ] && cat {folder}/config || exit 1 ;;
    *inspect*) echo linux/arm64 ;;
    pull*) touch {folder}/pulled ;;
    build*) cp $6/Dockerfile {folder}/built ;;
    login*) cat > {folder}/password ;;
esac
"""


def test_an_engine_builds_for_the_platform_and_pushes_with_a_password(tmp_path: Path) -> None:
    (tmp_path / "engine").write_text(ENGINE.format(folder=tmp_path))
    (tmp_path / "engine").chmod(0o755)
    engine, uri = ImageBuilder(command=str(tmp_path / "engine")), "1.dkr.ecr.us-west-2.amazonaws.com/shop:1"
    engine.push(uri, password="secret")
    assert (tmp_path / "password").read_text() == "secret"
    login = "login --username AWS --password-stdin 1.dkr.ecr.us-west-2.amazonaws.com"
    assert (tmp_path / "calls").read_text() == f"{login}\npush {uri}\n"
    for config, user in (
        ({"Entrypoint": None, "Cmd": ["python", "a.py"], "User": None}, "root"),
        ({"Entrypoint": ["python"], "Cmd": ["a.py"], "User": "app"}, "app"),
        ({"Entrypoint": ["python", "a.py"], "Cmd": None}, "root"),
    ):
        (tmp_path / "config").write_text(json.dumps(config))
        derive(engine, "base:1", uri=uri, target="linux/arm64")
        command = f'CMD ["python", "-m", "{STARTER}", "a.py"]'
        assert (tmp_path / "built").read_text().endswith(f"USER {user}\nENTRYPOINT []\n{command}\n")
    with pytest.raises(ConfigError, match="the image is for linux/arm64, and linux/amd64 is needed"):
        derive(engine, "base:1", uri=uri, target="linux/amd64")


@pytest.mark.parametrize(
    ("machine", "name"), [("aarch64", "linux/arm64"), ("arm64", "linux/arm64"), ("AMD64", "linux/amd64")]
)
def test_a_machine_has_the_platform_of_its_images(monkeypatch: pytest.MonkeyPatch, machine: str, name: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert this_platform() == name


def test_an_older_wheel_is_no_part_of_the_image(folder: Path) -> None:
    put_wheel_beside(folder)
    [wheel] = (folder / "wheels").iterdir()
    before = image_digest(folder, "linux/arm64")
    wheel.with_name("agentcore_rl_toolkit-0.1.0-py3-none-any.whl").write_bytes(b"PK")
    assert image_digest(folder, "linux/arm64") == before
    put_wheel_beside(folder)
    assert [path.name for path in (folder / "wheels").iterdir()] == [wheel.name]


def test_settings_of_this_machine_are_no_part_of_an_agent(folder: Path) -> None:
    before = digest_of(folder)
    (folder / ".env").write_text("AGENTCORE_AGENT_ARN=arn\nKEY=secret\n")
    assert digest_of(folder) == before
    assert ".env" not in [path.name for path in files_of(folder)]


@pytest.mark.parametrize(
    "name",
    [
        ".aws-credentials",
        ".docker/config.json",
        ".git-credentials",
        ".kube/config",
        ".pgpass",
        ".streamlit/secrets.toml",
        ".vault-token",
        "AuthKey_1.p8",
        "gha-creds-0a1b.json",
        "id_dsa",
        "kubeconfig",
        "Server.PEM",
        "app/credentials.json",
        "prod.env",
        "service-account.json",
        "signing.jks",
        "terraform.tfstate.backup",
        "explore.ipynb",
    ],
)
def test_a_secret_is_no_part_of_an_agent(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    (folder / "settings").symlink_to(name)  # by another name, too
    (folder / "credentials.py").write_text("")  # code
    assert [path.name for path in files_of(folder)] == ["Dockerfile", "agent.py", "credentials.py"]


def test_links_within_the_folder_are_followed_and_others_refused(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "credentials").write_text("x")
    (folder / "src" / "shop").mkdir(parents=True)
    (folder / "src" / "shop" / "tool.py").write_text("")
    (folder / "src" / "shop" / "again").symlink_to(folder)  # a circle
    (folder / "shop").symlink_to("src/shop")
    for name, other in (("in", "out"), ("out", "in")):  # a circle of two links
        (folder / name).mkdir()
        (folder / name / other).symlink_to(folder / other)
    (folder / ".venv").symlink_to(elsewhere)
    packed = {path.relative_to(folder).as_posix() for path in files_of(folder)}
    assert packed == {"Dockerfile", "agent.py", "shop/tool.py", "src/shop/tool.py"}
    (folder / "settings.ini").symlink_to(elsewhere / "credentials")
    (folder / "lib").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=f"lib is a link out of the folder, to {elsewhere}"):
        files_of(folder)
    assert len(files_of(folder, [folder / "lib", folder / "settings.ini"])) == len(packed)


def write_package(wheels: Path, files: dict[str, str]) -> None:
    """Write a wheel of a package with these files."""
    info = "shoplib-1.0.dist-info"
    files = {
        **files,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: shoplib\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheels / "shoplib-1.0-py3-none-any.whl", "w") as made:
        for name, text in files.items():
            made.writestr(name, text)
        made.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD")))


@pytest.mark.parametrize("name", ["env", ".other-env"])
def test_an_environment_of_any_name_is_left_out(folder: Path, name: str) -> None:
    (folder / name / "bin").mkdir(parents=True)
    (folder / name / "pyvenv.cfg").touch()
    (folder / name / "bin" / "python").symlink_to(sys.executable)
    assert [path.name for path in files_of(folder)] == ["Dockerfile", "agent.py"]


@pytest.mark.system
def test_an_archive_has_packages_complete_and_no_secrets_of_the_agent(folder: Path, tmp_path: Path) -> None:
    parts = {
        "cacert.pem": "CERTIFICATE",
        "runs/__init__.py": "",
        "train.jsonl": "{}",
        ".env.default": "A=1",
        "a.key": "k",
    }
    write_package(tmp_path, {f"shoplib/{name}": text for name, text in parts.items()})
    folder = tmp_path / "agent"
    (folder / "runs").mkdir(parents=True)
    for name in ("agent.py", ".env", "server.pem", "runs/record.json", "train.jsonl"):
        (folder / name).write_text("x = 1\n")
    (folder / "tool.sh").touch(0o755)
    wheel = (tmp_path / "shoplib-1.0-py3-none-any.whl").as_uri()
    (folder / "requirements.txt").write_text("-r more.txt\n-c limits.txt\n")
    (folder / "more.txt").write_text(f"shoplib @ {wheel}\n")
    (folder / "limits.txt").write_text("shoplib < 2\n")
    into = tmp_path / "into"
    into.mkdir()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    made = zipfile.ZipFile(make_archive(folder, target=this_platform(), python=python, into=into))
    names = set(made.namelist())
    assert {f"shoplib/{name}" for name in parts} | {"agent.py", "tool.sh"} <= names
    assert names.isdisjoint({".env", "server.pem", "runs/record.json", "train.jsonl"})
    assert not any("__pycache__" in name for name in names)
    assert (made.getinfo("tool.sh").external_attr >> 16) & 0o777 == 0o755

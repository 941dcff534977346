"""Maven for the agent and the reward: online, or offline with the repository of Debian's packages.

Debian's repository (`/usr/share/maven-repo`) has one version of each plugin, also under the default version number of Maven. For
offline builds, it lacks only plexus-utils 1.1, which Maven adds to old plugins. `local_repository` links to the repository, and
adds Debian's plexus-utils under this number.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

REPOSITORY_ENV = "MAVEN_OFFLINE_REPOSITORY"
DEBIAN_REPOSITORY = Path("/usr/share/maven-repo")
_UTILS = Path("org/codehaus/plexus/plexus-utils")
# A build compiles little and ends, so one JIT compiler and one collector are enough.
JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto -Xmx512m"
OUTPUT_BYTES = 64 << 10  # largest build output in a record


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished command. ``code`` is None if it took too long."""

    code: int | None
    output: str


def offline_repository() -> Path | None:
    """Return the repository for builds without a network: MAVEN_OFFLINE_REPOSITORY, or that of Debian. None: builds are online.

    If MAVEN_OFFLINE_REPOSITORY is empty, builds are online.
    """
    chosen = os.environ.get(REPOSITORY_ENV)
    if chosen is not None:
        return Path(chosen) if chosen else None
    return (
        DEBIAN_REPOSITORY if (DEBIAN_REPOSITORY / "org/apache/maven/plugins/maven-surefire-plugin").is_dir() else None
    )


def local_repository(folder: Path, source: Path) -> Path:
    """A local repository made of links to ``source``, in a new folder."""
    _link_all(source, folder, towards=_UTILS.parts)
    old = source / _UTILS / "2.x"
    if old.is_dir() and not (folder / _UTILS / "1.1").exists():
        made = folder / _UTILS / "1.1"
        made.mkdir()
        (made / "plexus-utils-1.1.jar").symlink_to(old / "plexus-utils-2.x.jar")
        pom = (old / "plexus-utils-2.x.pom").read_text()
        (made / "plexus-utils-1.1.pom").write_text(pom.replace("<version>2.x<", "<version>1.1<"))
    return folder


def _link_all(source: Path, folder: Path, towards: tuple[str, ...]) -> None:
    folder.mkdir(parents=True)
    for entry in sorted(source.iterdir()):
        if towards and entry.name == towards[0]:
            _link_all(entry, folder / entry.name, towards[1:])
        else:
            (folder / entry.name).symlink_to(entry)


def write_settings(folder: Path) -> Path:
    """Write `settings.xml` into ``folder``, with a local repository that builds write to, or read from if they are offline."""
    folder.mkdir(parents=True, exist_ok=True)
    source, repository = offline_repository(), folder / "repository"
    if source is not None:
        local_repository(repository, source)
    text = f"<settings><localRepository>{escape(str(repository))}</localRepository>"
    text += f"<offline>{'true' if source is not None else 'false'}</offline><interactiveMode>false</interactiveMode></settings>\n"
    file = folder / "settings.xml"
    file.write_text(text)
    return file


def environment(home: Path) -> dict[str, str]:
    """Return the variables of the agent's commands: a path, a home, and JVM options, without those of this process."""
    kept = {name: os.environ[name] for name in ("PATH", "JAVA_HOME", "LANG", "TMPDIR") if name in os.environ}
    # user.home comes from the list of users, not from HOME: without this all sessions would share one ~/.m2.
    options = f"{JVM_OPTIONS} -Duser.home={home}"
    return {"LANG": "C.UTF-8", **kept, "HOME": str(home), "MAVEN_OPTS": options, "LC_ALL": "C.UTF-8"}


def run(command: list[str], *, folder: Path, home: Path, limit_s: float) -> Finished:
    """Run a command and end everything it started when it is over. Output and errors together, bounded by their end."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    code: int | None
    try:
        output, _ = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if code is None:
        output, _ = process.communicate()
    return Finished(code=code, output=output[-OUTPUT_BYTES:].decode(errors="replace"))


def verify(tree: Path, scratch: Path, *, limit_s: float) -> Finished:
    """Run `mvn clean verify` with separate settings. Properties cannot skip tests, and failures do not stop it."""
    settings = write_settings(scratch / "settings")
    home = scratch / "home"
    home.mkdir()
    command = ["mvn", "-B", "-ntp", "-fae", "-s", str(settings), "clean", "verify"]
    command += ["-DskipTests=false", "-Dmaven.test.skip=false", "-Dmaven.test.failure.ignore=true"]
    return run(command, folder=tree, home=home, limit_s=limit_s)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A test as Surefire reports it."""

    owner: str
    name: str
    passed: bool


def reports(tree: Path) -> Iterator[Case]:
    """The tests that ran, from the reports of all modules. Reports that are not XML count as none."""
    for file in sorted(tree.rglob("target/surefire-reports/TEST-*.xml")):
        try:
            suite = ElementTree.parse(file).getroot()
        except ElementTree.ParseError:
            continue
        for case in suite.iter("testcase"):
            bad = any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
            name = re.split(r"[\[({ ]", case.get("name", ""), maxsplit=1)[0]
            yield Case(owner=case.get("classname", ""), name=name, passed=not bad)


def class_levels(tree: Path) -> dict[str, int]:
    """The major version of every class file that was compiled, by its path below `target/classes` or `target/test-classes`."""
    found = {}
    for kind in ("classes", "test-classes"):
        for folder in tree.rglob(f"target/{kind}"):
            for file in folder.rglob("*.class"):
                head = file.read_bytes()[:8]
                level = int.from_bytes(head[6:8], "big") if head[:4] == b"\xca\xfe\xba\xbe" else 0
                found[f"{folder.parent.parent.relative_to(tree)}/{kind}/{file.relative_to(folder)}"] = level
    return found

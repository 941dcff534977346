"""The migration agent: what its reward gives an oracle, no change and weakened tests; its tools and its payload."""

from __future__ import annotations

import contextlib
import io
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from serving import wait_for

from .loading import EXAMPLES, modules_of

EXAMPLE = EXAMPLES / "strands_migration_agent"
ORACLES = Path(__file__).parent / "migration_oracles"
MODULES = ("java_sources", "java_project", "maven", "reward", "payload", "workspace_tools")


@pytest.fixture(scope="module")
def agent() -> Iterator[SimpleNamespace]:
    with modules_of(EXAMPLE, *MODULES) as found:
        yield found


@pytest.fixture(scope="module")
def offline_maven(agent: SimpleNamespace) -> None:
    if not (shutil.which("mvn") and shutil.which("javac") and agent.maven.offline_repository()):
        pytest.skip("needs openjdk-17-jdk-headless, maven and Maven's plugins from Debian (scripts/system_packages.sh)")


TEST = """
package shop;
import static org.junit.Assert.*;
import org.junit.Test;

public class CartTest {
    private void check(int n) { assertEquals(n, cart().size()); }
    @Test public void adds() { cart().add("}"); assertEquals(1, cart().size()); assertTrue(cart().has("a")); }
    @Test(expected = IllegalStateException.class) public void refuses() { cart().add(null); }
    @Test public void smoke() { cart().add("a"); cart().clear(); }
    public static class Inner { @Test public void deep() { Assert.assertNull(find("x")); } }
}
"""


def changed(old: str, new: str) -> str:
    assert TEST.count(old) == 1, old
    return TEST.replace(old, new)


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (None, "was deleted"),
        (changed('@Test public void smoke() { cart().add("a"); cart().clear(); }', ""), "smoke was deleted"),
        (changed("cart().clear(); ", ""), "smoke does less"),
        (changed("@Test public void smoke", "@Test @Ignore public void smoke"), "smoke was turned off"),
        (changed("public class CartTest", '@Disabled("later") public class CartTest'), "was turned off"),
        (changed("@Test public void smoke() {", "@Test public void smoke() { assumeTrue(false);"), "was turned off"),
        (changed("@Test public void smoke", "public void smoke"), "no test any more"),
        (changed('assertTrue(cart().has("a"));', ""), "adds lost an assertion"),
        (changed('assertTrue(cart().has("a"));', "assertTrue(true);"), "adds lost an assertion"),
        (changed("@Test(expected = IllegalStateException.class)", "@Test"), "refuses lost an assertion"),
        (changed("assertEquals(n, cart().size());", ""), "check lost an assertion"),
        (changed('find("x")', "null"), r"Inner.deep lost an assertion"),
        (changed('{ cart().add("}");', '{ if (old()) return; cart().add("}");'), "skip its assertions"),
    ],
)
def test_a_weakened_test_is_found(agent: SimpleNamespace, after: str | None, why: str) -> None:
    findings = agent.java_sources.weaker(TEST, after, must_change=False)
    assert any(why in finding for finding in findings), findings


POM = b"<project><properties><a>1</a></properties><modules><module>core</module></modules></project>"


def test_tests_and_start_up_configuration_are_judged_as_they_were(agent: SimpleNamespace) -> None:
    first = {
        "src/test/java/ATest.java": b"a",
        "src/test/java/BTest.java": b"b",
        "src/main/java/A.java": b"m",
        "pom.xml": b"<p/>",
    }
    project = agent.java_project.JavaProject(
        name="x", files=first, tests_that_must_change=frozenset({"src/test/java/BTest.java"})
    )
    theirs = dict.fromkeys(
        [*first, ".mvn/maven.config", "src/test/java/A.java", "core/src/test/resources/x"], b"theirs"
    )
    assert agent.reward.judged(project, theirs) == {
        "src/test/java/ATest.java": b"a",
        "src/test/java/BTest.java": b"theirs",
        "src/main/java/A.java": b"theirs",
        "pom.xml": b"theirs",
    }


@pytest.mark.system
@pytest.mark.timeout(900)
def test_an_oracle_gets_1_half_of_it_a_half_no_change_and_weakened_tests_0(
    agent: SimpleNamespace, offline_maven: None, tmp_path: Path
) -> None:
    """One project whose break shows only when the tests run, so that every step of the reward is seen. Three builds."""
    project = agent.java_project.JavaProject.named("settings")
    oracle = agent.java_project.read_tree(ORACLES / "settings")
    assert project.files.keys() >= oracle.keys()

    def score_of(name: str, changes: dict[str, bytes]) -> object:
        agent.java_project.write_tree(tmp_path / name, {**project.files, **changes})
        return agent.reward.score(project, tmp_path / name)

    done = score_of("done", oracle)
    assert (done.reward, done.build, done.tests, done.findings) == (1.0, True, True, [])
    assert done.tests_passed == done.tests_expected == 3
    half = score_of("half", {"pom.xml": oracle["pom.xml"]})
    assert (half.reward, half.build, half.tests) == (0.5, True, False)
    assert "aValueIsThereWhileTheBodyRuns did not run and pass" in " ".join(half.findings)
    none = score_of("none", {})
    assert (none.reward, none.build) == (0.0, False)
    assert "not of version 61" in none.findings[0]
    test = project.tests[0]
    weak = score_of("weak", {**oracle, test: project.files[test].replace(b"assertEquals(home", b"assertNotNull(home")})
    assert (weak.reward, weak.weakened) == (0.0, True)


def test_a_build_that_takes_too_long_is_ended_with_all_it_started(agent: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    command = ["bash", "-c", "sleep 300 & echo $!; wait"]
    finished = agent.maven.run(command, folder=tmp_path, home=tmp_path / "home", limit_s=3)
    assert finished.code is None
    with contextlib.suppress(psutil.NoSuchProcess):
        sleeper = psutil.Process(int(finished.output))
        wait_for(lambda: sleeper.status() == psutil.STATUS_ZOMBIE)


def test_commands_see_a_home_of_their_own_and_no_secret(
    agent: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    with agent.workspace_tools.Workspace(agent.java_project.JavaProject.named("stock")) as workspace:
        assert workspace.run("ls") == "pom.xml\nstock-core\nstock-report\n"
        assert "s3cret" not in workspace.run("env")
        assert workspace.run("echo $HOME") == f"{workspace.home}\n"
        assert workspace.run("exit 3").endswith("[exit code 3]")
        assert workspace.edit("replace", "pom.xml", "2.5", "2.3.2", 0) == "changed pom.xml"
        assert "exactly once" in workspace.edit("replace", "pom.xml", "x", "version", 0)
        assert "not a file inside" in workspace.edit("create", "../x", "", "", 0)
        assert "No such file" in workspace.edit("view", "none", "", "", 0)
        assert workspace.edit("insert", "notes/a.txt", "x", "", 0).startswith("error")
        assert workspace.edit("create", "notes/a.txt", "one\n", "", 0) == "wrote notes/a.txt"
        assert workspace.edit("insert", "notes/a.txt", "two", "", 1) == "changed notes/a.txt"
        assert workspace.edit("view", "notes/a.txt", "", "", 0) == "1\tone\n2\ttwo\n"
        assert "+          <version>2.5</version>" not in workspace.patch()
        assert "+++ b/notes/a.txt" in workspace.patch()
        (workspace.tree / "out").symlink_to("/etc")
        assert "not a file inside" in workspace.edit("view", "out/passwd", "", "", 0)
        assert "out/passwd" not in agent.java_project.read_tree(workspace.tree)
        folder = workspace.tree.parent
    assert not folder.exists()


def test_a_project_comes_from_an_archive_and_nothing_leads_out_of_it(agent: SimpleNamespace, tmp_path: Path) -> None:
    def archive(*files: tuple[str, bytes]) -> str:
        with tarfile.open(tmp_path / "shop.tar.gz", "w:gz") as made:
            for path, data in files:
                info = tarfile.TarInfo(path)
                info.size = len(data)
                made.addfile(info, io.BytesIO(data))
        return (tmp_path / "shop.tar.gz").as_uri()

    def load(uri: str) -> object:
        return agent.payload.MigrationRequest.of({"repo_uri": uri}).load()

    project = load(archive(("shop-1/pom.xml", POM), ("shop-1/src/A.java", b"a"), ("shop-1/.git/config", b"c")))
    assert (project.name, dict(project.files)) == ("shop", {"pom.xml": POM, "src/A.java": b"a"})
    with pytest.raises(ValueError, match="leads out"):
        load(archive(("pom.xml", POM), ("../x", b"")))
    with pytest.raises(ValueError, match=r"no pom\.xml"):
        load(archive(("readme", b"")))
    (tmp_path / "shop.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"not a .*tar.gz"):
        load((tmp_path / "shop.tar.gz").as_uri())
    with pytest.raises(ValueError, match="no project 'none'"):
        agent.payload.MigrationRequest.of({"project": "none"}).load()

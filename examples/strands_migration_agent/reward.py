"""The reward of a migration from Java 8 to 17: half for the build, and half for the tests.

If tests are weakened, the reward is 0. A copy of the sources without `target` is scored in three steps:

1. The tests and the Maven configuration are compared with the first version of the project, which stays in memory. A test that
   was deleted, emptied, turned off or lost an assertion is a weakening, and so is a configuration that leaves tests out.
2. The tests, their resources, and `.mvn` of the first version replace those of the copy, except test files that do not compile
   on 17. So the tests of the first version decide.
3. `mvn clean verify` runs once, with separate settings. *Build*: it succeeds, every class file has major version 61, and every
   type of the main sources of the first version was compiled. *Tests*: every test method of the first version ran and passed.
"""

from __future__ import annotations

import re
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import java_sources
import maven
from java_project import JavaProject, is_test, read_tree, write_tree

JAVA_17 = 61
BUILD_LIMIT_S = 600.0
# Configuration that leaves tests out, looks elsewhere for them, or ignores their failures.
_LEAVES_OUT = re.compile(
    r"(maven\.)?(test\.)?skip(Tests|ITs|Exec)?|skip|(maven\.test\.|test)[fF]ailure\.?[iI]gnore|excludes?|testExcludes?|includes?|testIncludes?"
    r"|excludesFile|includesFile|test|(excluded)?[gG]roups|suiteXmlFiles?|testSourceDirectory|testClassesDirectory|classesDirectory"
    r"|additionalClasspathElements?|outputDirectory|testOutputDirectory|reportsDirectory|failIfNoTests|dependenciesToScan"
)
_UNREADABLE = "unreadable"
_RUNS_CODE = frozenset(
    {
        "build-helper-maven-plugin",
        "exec-maven-plugin",
        "gmaven-plugin",
        "gmavenplus-plugin",
        "groovy-maven-plugin",
        "maven-antrun-plugin",
    }
)


@dataclass(frozen=True, kw_only=True)
class Score:
    """``reward`` is 0, 0.5 or 1. ``findings`` are the reasons if it is not 1."""

    reward: float
    build: bool
    tests: bool
    weakened: bool
    tests_passed: int
    tests_expected: int
    findings: list[str] = field(default_factory=list)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the record."""
        return {
            "build": float(self.build),
            "tests": float(self.tests),
            "weakened": float(self.weakened),
            "tests_passed": self.tests_passed,
            "tests_expected": self.tests_expected,
        }


def score(project: JavaProject, tree: Path, *, limit_s: float = BUILD_LIMIT_S) -> Score:
    """Score a changed project, which takes one Maven build. Changes of the agent never raise an exception."""
    expected = expected_tests(project)
    try:
        files = read_tree(tree)
    except (ValueError, OSError) as e:
        return _nothing(expected, [f"the tree cannot be read: {e}"])
    weakened = weakenings(project, files)
    if weakened:
        return _nothing(expected, weakened, weakened=True)
    with tempfile.TemporaryDirectory(prefix="migration-", ignore_cleanup_errors=True) as scratch:
        copy = Path(scratch) / "tree"
        write_tree(copy, judged(project, files))
        finished = maven.verify(copy, Path(scratch), limit_s=limit_s)
        findings = build_findings(project, copy, finished)
        build = not findings
        passed, missing = _tests(expected, copy)
    tests = build and not missing
    findings += [f"{owner}.{name} did not run and pass" for owner, name in missing]
    return Score(
        reward=0.5 * build + 0.5 * tests,
        build=build,
        tests=tests,
        weakened=False,
        tests_passed=passed,
        tests_expected=sum(expected.values()),
        findings=findings,
    )


def _nothing(expected: Counter[tuple[str, str]], findings: list[str], *, weakened: bool = False) -> Score:
    return Score(
        reward=0.0,
        build=False,
        tests=False,
        weakened=weakened,
        tests_passed=0,
        tests_expected=sum(expected.values()),
        findings=findings,
    )


def expected_tests(project: JavaProject) -> Counter[tuple[str, str]]:
    """The test methods of the first version: class and name."""
    found = java_sources.tests({path: project.text(path) for path in project.tests})
    return Counter(("" if test.abstract_owner else test.owner, test.name) for test in found if not test.turned_off)


def judged(project: JavaProject, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The tree that is built: the agent's sources and poms, the first version's tests and Maven start-up configuration."""
    kept = {path: data for path, data in files.items() if not is_test(path) and not f"/{path}".count("/.mvn/")}
    for path, data in project.files.items():
        if is_test(path) or "/.mvn/" in f"/{path}":
            must_change = path in project.tests_that_must_change
            kept[path] = files.get(path, data) if must_change else data
    return kept


def weakenings(project: JavaProject, files: Mapping[str, bytes]) -> list[str]:
    """Return what the tree no longer tests, compared with the first version."""
    found: list[str] = []
    for path in project.tests:
        after = files[path].decode(errors="replace") if path in files else None
        must = path in project.tests_that_must_change
        found += java_sources.weaker(project.text(path), after, must_change=must)
    before = Counter(_configuration({p: d for p, d in project.files.items() if p.endswith("pom.xml")}))
    now = Counter(_configuration({p: d for p, d in files.items() if p.endswith("pom.xml")}))
    found += [f"the build leaves tests out: {what}" for what in now - before]
    modules = _modules(project.files)
    if files.get("pom.xml") is not None and _parse(files["pom.xml"]).tag != _UNREADABLE:
        modules -= _modules(files)
        found += [f"a module was taken out: {what}" for what in modules]
    return found


def _configuration(poms: Mapping[str, bytes]) -> Iterator[str]:
    for path, data in poms.items():
        for element, trail in _walk(_parse(data)):
            value = " ".join("".join(element.itertext()).split())
            plain = value.lower() not in ("", "false") and trail[-2:-1] != ["resource"]
            if _LEAVES_OUT.fullmatch(trail[-1]) and plain and _is_setting(trail):
                yield f"{path}: {'/'.join(trail[1:])} = {value}"
            if trail[-2:] == ["plugin", "artifactId"] and value in _RUNS_CODE:
                yield f"{path}: {value} adds sources or runs its own code"


def _is_setting(trail: list[str]) -> bool:
    """Properties, plugin configuration and the build's own folders; not, say, the exclusions of a dependency."""
    return bool({"properties", "configuration"} & set(trail)) or trail[-2:-1] == ["build"]


def _modules(files: Mapping[str, bytes]) -> Counter[str]:
    found: Counter[str] = Counter()
    for path, data in files.items():
        if path.endswith("pom.xml"):
            found.update(
                f"{path}: {(element.text or '').strip()}"
                for element, trail in _walk(_parse(data))
                if trail[-2:] == ["modules", "module"]
            )
    return found


def _parse(data: bytes) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(data)
    except ElementTree.ParseError:
        return ElementTree.Element(_UNREADABLE)  # Maven will not read it either: the build fails


def _walk(element: ElementTree.Element, above: tuple[str, ...] = ()) -> Iterator[tuple[ElementTree.Element, list[str]]]:
    trail = (*above, element.tag.rpartition("}")[2])
    yield element, list(trail)
    for child in element:
        yield from _walk(child, trail)


def build_findings(project: JavaProject, tree: Path, finished: maven.Finished) -> list[str]:
    """Return what is wrong with a build. Empty: the build counts."""
    if finished.code is None:
        return ["the build took too long"]
    levels = maven.class_levels(tree)
    found = []
    if finished.code != 0:
        errors = [line for line in finished.output.splitlines() if line.startswith("[ERROR]")]
        found.append(f"the build failed: {' '.join(errors[:3])[:500]}")
    if not levels:
        return [*found, "nothing was compiled"]
    other = {path: level for path, level in levels.items() if level != JAVA_17}
    if other:
        path, level = next(iter(other.items()))
        found.append(f"{len(other)} of {len(levels)} class files are not of version {JAVA_17}: {path} is {level}")
    compiled = {path.partition("/classes/")[2] for path in levels}
    for source in project.mains:
        types = java_sources.top_level_types(project.text(source))
        missing = [name for name in types if f"{name.replace('.', '/')}.class" not in compiled]
        found += [f"{name} was not compiled" for name in missing]
    return found


def _tests(expected: Counter[tuple[str, str]], tree: Path) -> tuple[int, list[tuple[str, str]]]:
    """Count the expected tests that passed, and list those that did not. A test of an abstract class runs under other classes."""
    cases = list(maven.reports(tree))
    bad = {(case.owner, case.name) for case in cases if not case.passed}
    good = {(case.owner, case.name) for case in cases} - bad
    names = {name for _, name in good} - {name for _, name in bad}
    missing = [test for test in expected if not (test in good or (test[0] == "" and test[1] in names))]
    return sum(expected.values()) - sum(expected[test] for test in missing), missing

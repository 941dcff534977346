"""Prove the migration agent: oracle, nothing, half and weakened tests, each through the deployed agent's own tools.

    python examples/strands_migration_agent/proof.py [--quick] [--json FILE] [--here]

The oracles are outside the agent's folder, in `tests/examples/migration_oracles`, where no session can read them.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ORACLES = HERE.parents[1] / "tests" / "examples" / "migration_oracles"
sys.path[:0] = [str(HERE), str(HERE.parent)]

from java_project import names, read_tree  # noqa: E402
from maven import offline_repository  # noqa: E402

from agentcore_rl_toolkit.gateway.testing import ToolCall  # noqa: E402
from harness import Proof, Result, mean, parser, skip, tool_calls  # noqa: E402  (the examples are not a package)

QUICK = ("payment-reference", "settings")
# They fail only in tests, so they build if only the Java level changes.
BUILDS_WITH_THE_LEVEL_ALONE = ("price-rule", "runtimes", "settings")
SUREFIRE = "<plugin><artifactId>maven-surefire-plugin</artifactId><configuration>{}</configuration></plugin>"


def in_first_test(pattern: str, by: str) -> str:
    """A command that changes the first test file."""
    return f"f=$(find . -path '*src/test*' -name '*.java' | sort | head -1); perl -0pi -e 's/{pattern}/{by}/' \"$f\""


def in_pom(text: str) -> str:
    """A command that puts a property or a plugin's configuration into the top pom."""
    if "<plugin>" not in text:
        whole = f"<properties>{text}</properties></project>"
        return f"perl -0pi -e 's|<properties>|<properties>{text}| or s|</project>|{whole}|' pom.xml"
    whole = f"<build><plugins>{text}</plugins></build></project>"
    return f"perl -0pi -e 's|</plugins>|{text}</plugins>| or s|</project>|{whole}|' pom.xml"


WEAKENINGS: dict[str, str] = {
    "a test file deleted": "rm $(find . -path '*src/test*' -name '*.java' | sort | head -1)",
    "a test ignored": in_first_test(r"(\@Test|public void test)", r"\@org.junit.Ignore $1"),
    "an assertion removed": in_first_test(r"\n *assert\w+\([^\n]*;", ""),
    "a value compared with itself": in_first_test(r"assertEquals\(([^\n,]*), [^\n]*\);", r"assertEquals($1, $1);"),
    "a test no longer a test": in_first_test(r"\@Test[^\n]*\n|void test", "void check"),
    "an assertion behind a return": in_first_test(r"(void \w+\(\)[^\n]*\{)", r"$1 if (true) return;"),
    "tests skipped by a property": in_pom("<skipTests>true</skipTests>"),
    "failures ignored": in_pom(SUREFIRE.format("<testFailureIgnore>true</testFailureIgnore>")),
    "tests left out by Surefire": in_pom(SUREFIRE.format("<excludes><exclude>**/*Test.java</exclude></excludes>")),
}


def solver(steps: Callable[[str], list[ToolCall]]) -> Callable[[list[dict[str, Any]], list[dict[str, Any]]], Any]:
    """A model that makes all its calls in its first turn and then says that it is done."""

    def decide(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
        if messages[-1]["role"] == "tool":
            return "Migrated."
        asked = next(m["content"] for m in messages if m["role"] == "user")
        found = re.search(r"the project (\S+) in", asked)
        assert found is not None, asked
        return steps(found[1]) or "There is nothing to do."

    return decide


def oracle(name: str) -> list[ToolCall]:
    """The files that a careful migration changes, written by the editor."""
    files = read_tree(ORACLES / name)
    return [ToolCall("editor", {"command": "create", "path": path, "text": files[path].decode()}) for path in files]


def level_alone(name: str) -> list[ToolCall]:
    pom = read_tree(ORACLES / name)["pom.xml"].decode()
    return [ToolCall("editor", {"command": "create", "path": "pom.xml", "text": pom})]


def weakened(how: str) -> Callable[[str], list[ToolCall]]:
    return lambda name: [*oracle(name), ToolCall("shell", {"command": WEAKENINGS[how]})]


def solver_without_end(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[ToolCall]:
    return [ToolCall("shell", {"command": "ls"})]


def main() -> None:
    options = parser(__doc__).parse_args()
    if shutil.which("mvn") is None or shutil.which("javac") is None:
        skip(HERE, options, "needs a JDK 17 and Maven: openjdk-17-jdk-headless and maven")
    if offline_repository() is None:
        skip(HERE, options, "needs Maven's plugins for offline builds: scripts/system_packages.sh installs them")
    chosen = [n for n in names() if not options.quick or n in QUICK]
    payloads = [{"project": name} for name in chosen]
    with Proof(
        example=HERE, framework="Strands Agents", options=options, max_concurrent=2, rollout_timeout_s=900.0
    ) as proof:
        solved = proof.run(payloads, solver(oracle))
        proof.check_all_ok(solved, "the oracle's rollouts end ok")
        nothing = proof.run(payloads, solver(lambda name: []))
        proof.check_all_ok(nothing, "doing nothing ends ok")
        half_of = [p for p in payloads if p["project"] in BUILDS_WITH_THE_LEVEL_ALONE]
        half = proof.run(half_of, solver(level_alone))
        ways = list(WEAKENINGS)[: 4 if options.quick else None]
        weak: list[Result] = []
        for i, how in enumerate(ways):
            weak += proof.run([payloads[i % len(payloads)]], solver(weakened(how)))
        everything = [solved, nothing, half, weak]
        note = f"{len(chosen)} projects, {len(weak)} ways to weaken tests"
        proof.row(
            rollouts=sum(map(len, everything)),
            oracle_reward=mean(solved),
            noop_reward=mean(nothing),
            tool_calls=tool_calls(*everything),
            note=note,
        )
        proof.check(
            "the oracle's migration gets 1", value=[r.reward for r in solved], target="all 1", ok=of(solved) == {1.0}
        )
        proof.check("no change gets 0", value=[r.reward for r in nothing], target="all 0", ok=of(nothing) == {0.0})
        proof.check(
            "a build whose tests fail gets 0.5", value=[r.reward for r in half], target="all 0.5", ok=of(half) == {0.5}
        )
        endless = proof.run([{**payloads[0], "max_turns": 3}], solver_without_end)
        ended = [(result.reward, result.cause, result.failure) for result in endless]
        target = [(0.0, "policy", "turns")]
        proof.check("out of turns is the policy's failure", value=ended, target=target, ok=ended == target)
        for how, result in zip(ways, weak, strict=True):
            seen = (result.reward, (result.result.get("metrics") or {}).get("weakened"))
            proof.check(f"weakened gets 0: {how}", value=seen, target=(0.0, 1.0), ok=seen == (0.0, 1.0))


def of(results: list[Result]) -> set[float | None]:
    return {result.reward for result in results}


if __name__ == "__main__":
    main()

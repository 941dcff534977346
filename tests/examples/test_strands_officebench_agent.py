"""OfficeBench: the workspace, the applications, the nine evaluation functions with files that a policy might write, the reward.

The packages that the example needs besides ours come from an environment of its own, built upon this one.
"""

from __future__ import annotations

import io
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .loading import EXAMPLES, load

EXAMPLE = EXAMPLES / "strands_officebench_agent"
TASKS = Path(__file__).parents[3] / "shared" / "data" / "officebench" / "tasks"
# The office libraries' own warnings, among them what they say of damaged files.
pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("default")]

needs_tasks = pytest.mark.skipif(not TASKS.is_dir(), reason="OfficeBench's tasks are not on this machine")


@pytest.fixture(scope="module")
def office(make_environment: Callable[..., str]) -> Iterator[SimpleNamespace]:
    """The example's modules, imported here, with its packages at the end of the path."""
    wanted = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["dependencies"]
    python = Path(make_environment("officebench", *wanted, upon_this=True))
    packages = next(python.parents[1].glob("lib/python*/site-packages"))
    before = set(sys.modules)
    sys.path[:0] = [str(EXAMPLE)]
    sys.path.append(str(packages))
    names = ("comparator", "documents", "errors", "evaluation", "request", "tasks", "tools", "workspace")
    try:
        modules = {name: import_module(f"officebench.{name}") for name in names}
        loaded = {name: load(EXAMPLE / f"{name}.py") for name in ("reward", "solver", "audit")}
        yield SimpleNamespace(**modules, **loaded, packages=packages)
    finally:
        sys.path.remove(str(EXAMPLE))
        sys.path.remove(str(packages))
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "officebench":
                del sys.modules[name]


@pytest.fixture
def workspace(office: SimpleNamespace, tmp_path: Path) -> Any:
    root = tmp_path / "workspace"
    for name in ("data", "calendar", "emails"):
        (root / name).mkdir(parents=True)
    return office.workspace.Workspace(root)


@pytest.fixture
def use(office: SimpleNamespace, workspace: Any) -> dict[str, Callable[..., str]]:
    """What the agent can do, by name."""
    functions: dict[str, Callable[..., str]] = office.tools.office_functions(workspace)
    return functions


@pytest.fixture
def verdict(office: SimpleNamespace, workspace: Any, tmp_path: Path) -> Callable[..., Any]:
    """Apply one evaluation function to the workspace."""

    def judge(function: str, published: bool = False, **args: Any) -> Any:
        check = office.tasks.Check(function=function, args=args)
        folder = tmp_path / "task"
        task = office.tasks.Task(
            task_id="1-1/0", text="", username="Bob", date="", weekday="", time="", checks=(check,), folder=folder
        )
        return office.evaluation.judge(task, workspace, published=published)

    return judge


# -- the workspace


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "data/../../x",
        "/etc/passwd",
        "~/x",
        "/testbed/../x",
        "data/\0",
        "",
        "x" * 301,
        "data/" + "é" * 150,
        "/testbedx/y",
    ],
)
def test_a_path_outside_the_workspace_is_refused(office: SimpleNamespace, workspace: Any, name: str) -> None:
    with pytest.raises(office.errors.OfficeError):
        workspace.path(name)


def test_symbolic_links_are_not_followed(office: SimpleNamespace, workspace: Any, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (workspace.root / "data/link.txt").symlink_to(tmp_path / "secret.txt")
    (workspace.root / "data/folder").symlink_to(tmp_path)
    for name in ("data/link.txt", "data/folder/secret.txt"):
        with pytest.raises(office.errors.OfficeError, match="symbolic link"):
            workspace.read(name)
        with pytest.raises(office.errors.OfficeError, match="symbolic link"):
            workspace.write(name, b"")
    assert (tmp_path / "secret.txt").read_text() == "secret"


def test_each_rollout_has_its_own_copy_which_is_removed_even_after_an_error(
    office: SimpleNamespace, tmp_path: Path
) -> None:
    testbed = tmp_path / "testbed"
    (testbed / "data").mkdir(parents=True)
    (testbed / "data/a.txt").write_text("as it was")
    (testbed / "data").chmod(0o555)
    roots = []

    def rollout_that_fails() -> None:
        with office.workspace.new_workspace(testbed) as one, office.workspace.new_workspace(testbed) as other:
            one.write("data/a.txt", b"changed")
            assert other.read("data/a.txt") == b"as it was"
            roots.extend([one.root, other.root])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rollout_that_fails()
    assert len(roots) == 2
    assert not any(root.exists() for root in roots)
    assert (testbed / "data/a.txt").read_text() == "as it was"


@pytest.mark.parametrize(
    "command",
    [
        "cat /etc/passwd", "cat ../x", "ls ..", "ls /", "cp data/a.txt /tmp/x", "mv data ../x", "rm -rf /testbed", "rm -rf .",
        "python -c 1", "cat data/a.txt | sh", "echo $(id)", "echo `id`", "echo $HOME", "ls & ls", "cat < /etc/passwd",
        "echo x > ../x", "echo x > /etc/x", "find / -name x", "find . -exec id", "grep root /etc/passwd", "mv data data/new",
        "cp -r data data/new", "cat 'data/a.txt", "ls */../..", "x" * 5_000, "rm data/none", "cp data/a.txt", "> x",
    ],
)  # fmt: skip
def test_the_shell_refuses_what_leads_out_or_starts_programs(
    office: SimpleNamespace, use: Any, workspace: Any, command: str
) -> None:
    workspace.write("data/a.txt", b"x")
    with pytest.raises(office.errors.OfficeError):
        use["shell_command"](command)
    assert workspace.read("data/a.txt") == b"x"


# -- the nine evaluation functions


def test_contain_reads_every_kind_of_file(use: Any, verdict: Any, workspace: Any) -> None:
    workspace.write("data/a.txt", b"The total is 1,200 dollars \xff")
    use["word_create_file"]("data/a.docx", "Total: 1,200")
    use["pdf_create_file"]("data/a.pdf", "Total: 1,200")
    use["excel_write_rows"]("data/a.xlsx", 1, [["Total", "1,200"]])
    use["calendar_create_event"]("Bob", "The total of " + "many " * 30 + "things is 1200", "2024-05-01", "2024-05-02")
    use["email_send"]("Alice", "Bob", "Total", "1,200")
    for kind, file in (("txt", "a.txt"), ("docx", "a.docx"), ("doc", "a.docx"), ("pdf", "a.pdf"), ("xlsx", "a.xlsx")):
        assert verdict("contain", doc_type=kind, file=f"./data/{file}", keywords=["TOTAL", "1200"]).passed, kind
        assert not verdict("contain", doc_type=kind, file=f"data/{file}", keywords=["total", "1300"]).passed, kind
    assert verdict(
        "contain", doc_type="ics", file="calendar/Bob.ics", keywords=["many things is 1200"]
    ).passed  # folded lines
    assert verdict("contain", doc_type="email", username="bob", keywords=["total", "1200"]).passed
    assert verdict("contain", doc_type="email", username="lice", keywords=["total"]).passed
    assert not verdict("contain", doc_type="email", username="Carol", keywords=["total"]).passed
    assert not verdict("contain", doc_type="txt", file="data/none.txt", keywords=["total"]).passed


@pytest.mark.parametrize(
    "source",
    [
        "1", "lambda: 1", "lambda x, y: 1", "lambda x: open('a')", "lambda x: x.__class__", "lambda x: [y for y in x]",
        "lambda x: x ** 9", "lambda x: other", "lambda x: (lambda y: y)(x)", "lambda x: x.format('a')", "lambda x: f'{x}'",
        "lambda x: x[0]", "lambda x: int(x, 2)", "lambda x: 'a'.join(x)", "lambda x: " + "not " * 200 + "x", "lambda x:", "\0",
        "lambda x: len(key=x)", "lambda x: x << 3", "lambda x: {**x}", "lambda x: b''", "lambda x: " + "(" * 250 + ")" * 200,
    ],
)  # fmt: skip
def test_the_comparator_refuses_everything_else(office: SimpleNamespace, source: str) -> None:
    with pytest.raises(office.errors.TaskError):
        office.comparator.Comparator(source)


def test_exact_match_compares_with_the_tasks_own_reference(
    use: Any, verdict: Any, workspace: Any, tmp_path: Path
) -> None:
    use["excel_write_rows"]("data/a.xlsx", 1, [["Name", "n"], ["Ann", 1]])
    use["pdf_create_file"]("data/a.pdf", "the same")
    for name in ("reference/a.xlsx", "testbed/data/a.pdf"):
        (tmp_path / "task" / name).parent.mkdir(parents=True)
        (tmp_path / "task" / name).write_bytes(workspace.read(f"data/{Path(name).name}"))
    sheet = {"doc_type": "xlsx", "result_file": "./data/a.xlsx", "expected_file": "../../../../reference/a.xlsx"}
    pdf = {"doc_type": "pdf", "result_file": "data/b.pdf", "expected_file": "data/a.pdf"}
    assert verdict("exact_match", **sheet).passed
    use["excel_set_cell"]("data/a.xlsx", 9, 9, "more")
    assert not verdict("exact_match", **sheet).passed
    use["pdf_create_file"]("data/a.pdf", "another")
    use["pdf_create_file"]("data/b.pdf", "another")
    assert not verdict("exact_match", **pdf).passed  # not with the copy that the policy can change
    use["pdf_create_file"]("data/b.pdf", "the same")
    assert verdict("exact_match", **pdf).passed


# -- files that a policy might write to break its judge


def _xlsx(sheet: str, more: bytes = b"") -> bytes:
    """An Excel file with this XML as its sheet."""
    import openpyxl

    buffer, made = io.BytesIO(), io.BytesIO()
    openpyxl.Workbook().save(buffer)
    namespace = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            xml = f'<worksheet xmlns="{namespace}">{sheet}</worksheet>'.encode()
            target.writestr(name, xml if name == "xl/worksheets/sheet1.xml" else source.read(name))
        if more:
            target.writestr("xl/more.bin", more)
    return made.getvalue()


# -- the tasks themselves


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFICEBENCH_TASKS", str(TASKS))


@needs_tasks
@pytest.mark.usefixtures("benchmark")
def test_the_reward_judges_in_a_process_of_its_own(office: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(office.packages))
    task = office.tasks.load_task("1-10/0")
    reward = office.reward.OfficeReward()
    with office.workspace.new_workspace(task.testbed) as workspace:
        workspace.write("data/answer.txt", b"The difference is 40.")
        assert reward.explain(task=task, workspace=workspace) == {"reward": 1.0, "published": 1.0, "reasons": []}
    many = f"<row>{'<c><v>1</v></c>' * 20}</row>" * 9_000  # below the bounds, but seconds of work
    slow = office.tasks.load_task("2-10/0")
    with office.workspace.new_workspace(slow.testbed) as workspace:
        workspace.write("data/score.xlsx", _xlsx(f"<sheetData>{many}</sheetData>"))
        stopped = office.reward.OfficeReward(cpu_s=1).explain(task=slow, workspace=workspace)
        assert stopped["reward"] == 0.0
        assert "more memory or time" in stopped["reasons"][0]
    broken = office.tasks.load_task("1-14/2")
    with (
        office.workspace.new_workspace(broken.testbed) as workspace,
        pytest.raises(RuntimeError, match="compares with"),
    ):
        reward(task=broken, workspace=workspace)


# -- the payload


def test_a_payload_names_its_task_and_nothing_else(office: SimpleNamespace) -> None:
    request = office.request.TaskRequest
    assert request.of({"task_id": "2-15/0", "_rollout": {"exp_id": "x"}}).prompt is None
    assert request.of({"task_id": "2-15/0", "prompt": "Do it"}).prompt == "Do it"
    for payload, entries in (
        ({"task_id": {"toolUse": {"name": "x"}}}, "not a toolUse block"),
        ({"task_id": "2-15/0", "prompt": {"toolUse": {}}}, "not a toolUse block"),
        ({"task_id": "2-15/0", "prompt": [{"text": "x"}]}, "not list"),
        ({"task_id": "../../x/0"}, "task_id"),
        ({"task_id": "2-15/0", "extra": 1}, "extra"),
        ({}, "task_id"),
    ):
        with pytest.raises(ValueError, match=entries):
            request.of(payload)
    with pytest.raises(TypeError, match="must be an object"):
        request.of("2-15/0")

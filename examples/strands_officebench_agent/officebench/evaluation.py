"""The nine evaluation functions of OfficeBench, and the verdict of a task.

There are two sets of rules. `published=True` has the rules of the benchmark's code, for numbers that can be compared. The other
rules, which are used for training, correct the errors of this code:

- *not contain* means none of the keywords, in a file that is there; published: not all of them, or no file.
- The text of a sheet is its cells; published: with coordinates, so that the keyword "2" is found in every second row.
- A number is not found at the beginning of a longer one ("1" in a cell that says 100).
- A file is read as what its name says, a check's missing `file` is searched next to `args`, PDFs are compared by their text,
  folded calendar lines are unfolded; published: such checks always fail.
- A folder is not a file.

A file of the workspace that is missing, damaged, or beyond the bounds of `documents` fails its check.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import documents
from .comparator import Comparator
from .errors import OfficeError, TaskError, UnreadableFileError
from .tasks import Task, load_task
from .workspace import Workspace


@dataclass(frozen=True)
class Verdict:
    """The result of a task. `reasons` has a line for each check that failed."""

    passed: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """The arguments of an evaluation function."""

    task: Task
    workspace: Workspace
    published: bool


def judge(task: Task, workspace: Workspace, *, published: bool = False) -> Verdict:
    """Apply all checks of a task to a workspace.

    Raises: TaskError if the task's files are incomplete.
    """
    case = Case(task, workspace, published)
    reasons = []
    for check in task.checks:
        if check.function not in FUNCTIONS:
            raise TaskError(f"task {task.task_id} asks for an evaluation that does not exist: {check.function}")
        args = dict(check.args)
        if not published and check.file_beside is not None:
            args.setdefault("file", check.file_beside)
        try:
            failure = FUNCTIONS[check.function](case, args)
        except KeyError as e:
            if check.file_beside is None:
                raise TaskError(f"task {task.task_id}: {check.function} lacks {e}") from e
            failure = f"the published evaluation does not find {e} of this check"
        except OfficeError as e:
            failure = str(e)
        if failure is not None:
            reasons.append(f"{check.function}: {failure}")
    return Verdict(not reasons, tuple(reasons))


# Each returns None if the check succeeds, otherwise the reason.


def contain(case: Case, args: Any) -> str | None:
    """Every keyword is in the text of a file, or in the emails of a user."""
    text = _text(case, args)
    missing = [keyword for keyword in args["keywords"] if not _found(keyword, text)]
    return f"{_subject(args)} does not say {', '.join(missing)}" if missing else None


def not_contain(case: Case, args: Any) -> str | None:
    """Check that the text of a file, or the emails of a user (who may have none), contain none of the keywords."""
    try:
        text = _text(case, args)
    except UnreadableFileError:
        if case.published and not case.workspace.path(args["file"]).exists():
            return None
        raise
    found = [keyword for keyword in args["keywords"] if _found(keyword, text)]
    failed = len(found) == len(args["keywords"]) if case.published else bool(found)
    return f"{_subject(args)} says {', '.join(found)}" if failed else None


def file_exist(case: Case, args: Any) -> str | None:
    """The file is there."""
    path = case.workspace.path(args["file"])
    there = path.exists() if case.published else path.is_file()
    return None if there else f"{args['file']} is not there"


def file_not_exist(case: Case, args: Any) -> str | None:
    """Nothing of this name is there."""
    return f"{args['file']} is there" if case.workspace.path(args["file"]).exists() else None


def diff_contain_text(case: Case, args: Any) -> str | None:
    """The lines in which a file differs from how it was at the start contain every keyword."""
    before = _file_text(case.task.published_file(args["input_file"]), args["doc_type"], case.published, sheets="lines")
    after = _file_text(case.workspace.file(args["output_file"]), args["doc_type"], case.published, sheets="lines")
    if before == after:
        return f"{args['output_file']} has not changed"
    first, second = before.split("\n"), after.split("\n")
    if len(first) + len(second) > 2 * documents.MAX_ROWS:
        raise UnreadableFileError(f"{args['output_file']} has more than {documents.MAX_ROWS} lines")
    change = "\n".join(difflib.unified_diff(first, second, n=0))
    missing = [keyword for keyword in args["keywords"] if keyword not in change]
    return f"the change of {args['output_file']} does not have {', '.join(missing)}" if missing else None


def excel_cell_value(case: Case, args: Any) -> str | None:
    """Each named cell begins with the expected text."""
    if case.published:
        content = "\n".join(documents.read_sheet(case.workspace.file(args["file"])).lines())
        wrong = [m for m in args["matches"] if f"({m['row']}, {m['col']}): {m['value']}" not in content]
    else:
        sheet = documents.read_sheet(case.workspace.file(args["file"]))
        wrong = [m for m in args["matches"] if not _begins(sheet.text(int(m["row"]), int(m["col"])), str(m["value"]))]
    return "; ".join(f"cell ({m['row']}, {m['col']}) is not {m['value']}" for m in wrong) or None


def excel_cell_comparator(case: Case, args: Any) -> str | None:
    """Each named cell holds one word for which the task's expression is true."""
    sheet = documents.read_sheet(case.workspace.file(args["file"]))
    wrong = []
    for match in args["matches"]:
        text = sheet.text(int(match["row"]), int(match["col"]))
        if text is None or not re.fullmatch(r"\w+", text) or not Comparator(match["comparator"])(text):
            wrong.append(f"cell ({match['row']}, {match['col']}) does not fit {match['comparator']}")
    return "; ".join(wrong) or None


def exact_match(case: Case, args: Any) -> str | None:
    """A file says the same as a reference: sheets cell by cell, the rest as text."""
    expected, result = case.task.published_file(args["expected_file"]), case.workspace.file(args["result_file"])
    if args["doc_type"] == "xlsx":
        same = documents.read_sheet(expected).values == documents.read_sheet(result).values
    elif case.published and args["doc_type"] == "pdf":
        return "the published evaluation treats all PDFs as different"
    else:
        texts = (_file_text(path, args["doc_type"], case.published) for path in (expected, result))
        same = next(texts).strip() == next(texts).strip()
    return None if same else f"{args['result_file']} differs from the request"


def calendar_no_overlap(case: Case, args: Any) -> str | None:
    """No two events of a user's calendar overlap; one may begin when another ends."""
    events = documents.read_events(case.workspace.file(f"calendar/{args['username']}.ics"))
    latest = None
    for event in events:
        if latest is not None and event.start < latest.end:
            return f"{latest.summary!r} and {event.summary!r} overlap in the calendar of {args['username']}"
        if latest is None or event.end > latest.end:
            latest = event
    return None


FUNCTIONS: dict[str, Callable[[Case, Any], str | None]] = {
    function.__name__: function
    for function in (
        contain,
        not_contain,
        file_exist,
        file_not_exist,
        diff_contain_text,
        excel_cell_value,
        excel_cell_comparator,
        exact_match,
        calendar_no_overlap,
    )
}


def _subject(args: Any) -> str:
    return f"the email of {args['username']}" if args["doc_type"] == "email" else str(args["file"])


def _text(case: Case, args: Any) -> str:
    if args["doc_type"] == "email":
        return "\n".join(str(message) for message in documents.read_emails(case.workspace, args["username"]))
    return _file_text(case.workspace.file(args["file"]), args["doc_type"], case.published)


def _file_text(path: Path, doc_type: str, published: bool, *, sheets: str = "cells") -> str:
    kind = doc_type if published else path.suffix.lower().lstrip(".") or doc_type
    match {"doc": "docx", "eml": "txt"}.get(kind, kind):
        case "xlsx":
            sheet = documents.read_sheet(path)
            return "\n".join(
                sheet.lines() if published or sheets == "lines" else (str(v) for v in sheet.values.values())
            )
        case "docx":
            return documents.read_document(path, tables=not published)
        case "pdf":
            return documents.read_pdf(path)
        case "ics" if not published:
            return documents.read_calendar_text(path)
        case "txt" | "ics":
            return documents.read_text(path)
    raise UnreadableFileError(f"{path.name}: files of this kind cannot be read")


def _found(keyword: str, text: str) -> bool:
    text, keyword = text.lower(), str(keyword).lower()
    return keyword in (text.replace(",", "") if _is_number(keyword) else text)


def _begins(cell: str | None, value: str) -> bool:
    """Return whether a cell begins with a value. Numbers must be equal: "5" fits "5 %" and "5.0", not "50" or "5.5"."""
    if cell is None or not cell.startswith(value):
        return False
    rest = cell[len(value) :]
    if not _is_number(value) or "." in value:
        return True  # more decimals than asked for are no error
    return re.match(r"[.,]?\d", rest) is None or re.match(r"\.0+(?!\d)", rest) is not None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def main() -> int:
    """Judge one workspace in a process with bounds; the verdicts by both rules go to stdout as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("task_id")
    parser.add_argument("workspace", type=Path)
    parser.add_argument("--tasks", type=Path)
    parser.add_argument("--cpu-s", type=int, default=60)
    parser.add_argument("--memory-bytes", type=int, default=2 * 2**30)
    options = parser.parse_args()
    task = load_task(options.task_id, options.tasks)
    resource.setrlimit(resource.RLIMIT_AS, (options.memory_bytes, options.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (options.cpu_s, options.cpu_s))
    workspace = Workspace(options.workspace)
    try:
        verdicts = {"trained": judge(task, workspace), "published": judge(task, workspace, published=True)}
    except MemoryError:
        verdict = Verdict(False, ("the files took more memory than the evaluation has",))
        verdicts = {"trained": verdict, "published": verdict}
    print(json.dumps({rules: asdict(verdict) for rules, verdict in verdicts.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The content of files, with limits, for the applications and for the evaluation.

Files may be hostile, because a policy can find weak points of its evaluation. Therefore an archive is measured before it is
opened, sheets are read as streams, and every text is cut at a limit.
"""

from __future__ import annotations

import email
import email.policy
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from pathlib import Path

import icalendar
import openpyxl
import pypdf
from docx import Document
from docx.document import Document as WordDocument

from .errors import UnreadableFileError
from .workspace import Workspace

MAX_UNPACKED_BYTES = 32 * 2**20  # the largest document of the benchmark unpacks to 6 MB
MAX_MEMBERS = 1_000
MAX_ROWS, MAX_COLUMNS, MAX_CELLS = 10_000, 500, 200_000
MAX_CHARACTERS = 4_000_000
MAX_PAGES = 200
MAX_EVENTS = 5_000
MAX_EMAILS = 500


def check_archive(path: Path) -> None:
    """Raises: UnreadableFileError if an Office file is no archive or would unpack to more than the bounds.

    `zipfile` reads no more of a member than its directory declares, so that a false size is caught as damage.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as e:
        raise UnreadableFileError(f"{path.name} is damaged, or is not what its name says: {e}") from None
    if len(members) > MAX_MEMBERS or sum(member.file_size for member in members) > MAX_UNPACKED_BYTES:
        raise UnreadableFileError(f"{path.name} unpacks to more than {MAX_UNPACKED_BYTES // 2**20} MB")


def load_workbook(path: Path, *, read_only: bool = False) -> openpyxl.Workbook:
    """An Excel file. Raises: UnreadableFileError."""
    check_archive(path)
    try:
        workbook = openpyxl.load_workbook(path, read_only=read_only)
    except Exception as e:  # damaged files raise whatever their reader ran into
        raise UnreadableFileError(f"{path.name} cannot be read as an Excel file: {type(e).__name__}: {e}") from None
    if workbook.active is None:
        raise UnreadableFileError(f"{path.name} has no sheet")
    return workbook


@dataclass(frozen=True)
class Sheet:
    """The cells of a sheet: `values[(row, column)]`, both from 1; `rows` and `columns` are the size of the rectangle."""

    values: dict[tuple[int, int], object]
    rows: int
    columns: int

    def text(self, row: int, column: int) -> str | None:
        """Return the text of a cell, or None if it is empty."""
        value = self.values.get((row, column))
        return None if value is None else str(value)

    def lines(self) -> Iterator[str]:
        """`(1, 1): Name` and so on, a row a line, as the benchmark shows sheets to a model."""
        for row in range(1, self.rows + 1):
            texts = (self.text(row, column) for column in range(1, self.columns + 1))
            yield "".join(
                f"({row}, {column}): {'[Empty Cell]' if text is None else text}\t"
                for column, text in enumerate(texts, 1)
            )


def read_sheet(path: Path, name: str | None = None) -> Sheet:
    """A sheet of an Excel file, the active one if none is named. Raises: UnreadableFileError."""
    workbook = load_workbook(path, read_only=True)
    try:
        if name is not None and name not in workbook.sheetnames:
            raise UnreadableFileError(f"{path.name} has no sheet {name!r}; it has {', '.join(workbook.sheetnames)}")
        sheet = workbook[name] if name is not None else workbook.active
        sheet.reset_dimensions()  # the declared size may be anything; the cells are counted as they come
        values: dict[tuple[int, int], object] = {}
        rows = columns = characters = 0
        for row, cells in enumerate(sheet.iter_rows(values_only=True), 1):
            for column, value in enumerate(cells[: MAX_COLUMNS + 1], 1):
                if value is not None:
                    values[row, column] = value
                    characters += len(value) if isinstance(value, str) else 8
                    rows, columns = max(rows, row), max(columns, column)
            if row > MAX_ROWS or len(cells) > MAX_COLUMNS or len(values) > MAX_CELLS or characters > MAX_CHARACTERS:
                raise UnreadableFileError(
                    f"{path.name} has more than {MAX_ROWS} rows, {MAX_COLUMNS} columns or {MAX_CHARACTERS} characters"
                )
        return Sheet(values, rows, columns)
    except UnreadableFileError:
        raise
    except Exception as e:
        raise UnreadableFileError(f"{path.name} cannot be read as an Excel file: {type(e).__name__}: {e}") from None
    finally:
        workbook.close()


def load_document(path: Path) -> WordDocument:
    """A Word file. Raises: UnreadableFileError."""
    check_archive(path)
    try:
        return Document(str(path))
    except Exception as e:
        raise UnreadableFileError(f"{path.name} cannot be read as a Word file: {type(e).__name__}: {e}") from None


def read_document(path: Path, *, tables: bool = True) -> str:
    """The paragraphs of a Word file, a line each, and the cells of its tables. Raises: UnreadableFileError."""
    document = load_document(path)
    parts = [paragraph.text for paragraph in document.paragraphs]
    if tables:
        parts += ["\t".join(cell.text for cell in row.cells) for table in document.tables for row in table.rows]
    return _bounded("\n".join(parts), path)


def read_pdf(path: Path) -> str:
    """The text of a PDF, page after page. Raises: UnreadableFileError."""
    try:
        reader = pypdf.PdfReader(path)
        count = len(reader.pages)
        if count > MAX_PAGES:
            raise UnreadableFileError(f"{path.name} has more than {MAX_PAGES} pages")
        text = ""
        for page in reader.pages:
            text = _bounded(f"{text}{page.extract_text()}\n", path)
        return text
    except UnreadableFileError:
        raise
    except Exception as e:
        raise UnreadableFileError(f"{path.name} cannot be read as a PDF: {type(e).__name__}: {e}") from None


def read_text(path: Path) -> str:
    """A text file, as UTF-8; invalid bytes become replacement characters."""
    return _bounded(path.read_bytes()[: MAX_CHARACTERS + 1].decode("utf-8", errors="replace"), path)


def read_calendar_text(path: Path) -> str:
    """A calendar file as text, with the lines that the format folds after 75 bytes whole again (RFC 5545, 3.1)."""
    return re.sub(r"\r?\n[ \t]", "", read_text(path))


@dataclass(frozen=True)
class Event:
    """An event of a calendar, in UTC. Times without a zone count as UTC. Days without a time begin at midnight."""

    summary: str
    start: datetime
    end: datetime
    location: str
    description: str


def load_calendar(path: Path) -> icalendar.Calendar:
    """A calendar file. Raises: UnreadableFileError."""
    try:
        calendar = icalendar.Calendar.from_ical(read_text(path))
    except UnreadableFileError:
        raise
    except Exception as e:
        raise UnreadableFileError(f"{path.name} cannot be read as a calendar: {type(e).__name__}: {e}") from None
    if not isinstance(calendar, icalendar.Calendar):
        raise UnreadableFileError(f"{path.name} does not hold one calendar")
    return calendar


def read_events(path: Path) -> list[Event]:
    """The events of a calendar file, by their start. Raises: UnreadableFileError, also if an event has no start."""
    try:
        found: list[Event] = []
        for component in load_calendar(path).walk("VEVENT"):
            if len(found) >= MAX_EVENTS:
                raise UnreadableFileError(f"{path.name} has more than {MAX_EVENTS} events")
            start = _moment(component["DTSTART"].dt)
            if "DTEND" in component:
                end = _moment(component["DTEND"].dt)
            else:
                end = start + component["DURATION"].dt if "DURATION" in component else start
            texts = (str(component.get(key, "")) for key in ("SUMMARY", "LOCATION", "DESCRIPTION"))
            summary, location, description = texts
            found.append(Event(summary, start, end, location, description))
        return sorted(found, key=lambda event: (event.start, event.end))
    except UnreadableFileError:
        raise
    except Exception as e:
        raise UnreadableFileError(f"{path.name} has an event that cannot be read: {type(e).__name__}: {e}") from None


def _moment(value: date | datetime) -> datetime:
    moment = value if isinstance(value, datetime) else datetime.combine(value, time())
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


@dataclass(frozen=True)
class Email:
    """An email of an account."""

    name: str
    sender: str
    recipient: str
    subject: str
    content: str
    attachments: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"Email ID: {self.name}", f"From: {self.sender}", f"To: {self.recipient}", f"Subject: {self.subject}"]
        if self.attachments:
            lines.append(f"Attachments: {', '.join(self.attachments)}")
        return "\n".join([*lines, f"Content: {self.content}"])


def read_email(path: Path) -> Email:
    """An email file; a part that cannot be decoded is left out. Raises: UnreadableFileError."""
    try:
        message = email.message_from_bytes(path.read_bytes(), policy=email.policy.default)
        parts, attachments = [], []
        for part in message.walk():
            if (name := part.get_filename()) is not None:
                attachments.append(name)
            elif part.get_content_type() in ("text/plain", "text/html"):
                content = part.get_payload(decode=True)
                parts.append(content.decode("utf-8", errors="replace") if isinstance(content, bytes) else "")
        return Email(
            name=path.name,
            sender=str(message["From"] or ""),
            recipient=str(message["To"] or ""),
            subject=str(message["Subject"] or ""),
            content=_bounded("\n".join(parts), path),
            attachments=tuple(attachments),
        )
    except UnreadableFileError:
        raise
    except Exception as e:
        raise UnreadableFileError(f"{path.name} cannot be read as an email: {type(e).__name__}: {e}") from None


def email_account(workspace: Workspace, username: str) -> Path | None:
    """Return the folder of a user's emails: with this name, in any case, or with it as a part. None if none fits."""
    home = workspace.path("emails")
    accounts = (
        sorted(path for path in home.iterdir() if path.is_dir() and not path.is_symlink()) if home.is_dir() else []
    )
    wanted = username.partition("@")[0].lower()
    for fits in (
        lambda name: name == username,
        lambda name: name.lower() == wanted,
        lambda name: wanted in name.lower(),
    ):
        for path in accounts:
            if wanted and fits(path.name):
                return path
    return None


def read_emails(workspace: Workspace, username: str) -> list[Email]:
    """The emails in a user's account, by the names of their files. Raises: UnreadableFileError."""
    account = email_account(workspace, username)
    paths = sorted(account.glob("*.eml")) if account else []
    if len(paths) > MAX_EMAILS:
        raise UnreadableFileError(f"{username} has more than {MAX_EMAILS} emails")
    return [read_email(workspace.file(workspace.name(path))) for path in paths]


def _bounded(text: str, path: Path) -> str:
    if len(text) > MAX_CHARACTERS:
        raise UnreadableFileError(f"{path.name} has more than {MAX_CHARACTERS} characters")
    return text

"""The applications as tools of a Strands agent, and the system prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strands import tool

from .apps.calendars import CalendarApp
from .apps.emails import EmailApp
from .apps.excel import ExcelApp
from .apps.ocr import OcrApp
from .apps.pdf import PdfApp
from .apps.shell import ShellApp
from .apps.word import WordApp
from .errors import OfficeError
from .tasks import Task
from .workspace import Workspace

MAX_TURNS = 40  # the longest solution of the proof takes 15
MAX_TOKENS = 2048  # limit of a reply
MAX_ANSWER = 4_000


class AnswerApp:
    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def answer(self, answer: str) -> str:
        """Give the answer to the question; only if the task is a question.

        Args:
            answer: The answer, as short as it can be
        """
        if len(answer) > MAX_ANSWER:
            raise OfficeError(f"the answer is longer than {MAX_ANSWER} characters")
        self._workspace.write("data/answer.txt", answer.encode())
        return "The answer is noted."


def office_functions(workspace: Workspace) -> dict[str, Callable[..., str]]:
    """Return the functions of a workspace, by the names of the tools."""
    calendar, mail, excel, word = CalendarApp(workspace), EmailApp(workspace), ExcelApp(workspace), WordApp(workspace)
    pdf, ocr, shell = PdfApp(workspace), OcrApp(workspace), ShellApp(workspace)
    return {
        "calendar_create_event": calendar.create_event,
        "calendar_list_events": calendar.list_events,
        "calendar_delete_event": calendar.delete_event,
        "email_send": mail.send,
        "email_list": mail.list_emails,
        "email_read": mail.read,
        "excel_read_file": excel.read_file,
        "excel_create_file": excel.create_file,
        "excel_set_cell": excel.set_cell,
        "excel_write_rows": excel.write_rows,
        "excel_delete_cell": excel.delete_cell,
        "excel_delete_row": excel.delete_row,
        "excel_convert_to_pdf": excel.convert_to_pdf,
        "word_read_file": word.read_file,
        "word_create_file": word.create_file,
        "word_append_text": word.append_text,
        "word_convert_to_pdf": word.convert_to_pdf,
        "pdf_read_file": pdf.read_file,
        "pdf_create_file": pdf.create_file,
        "pdf_convert_to_word": pdf.convert_to_word,
        "pdf_convert_to_image": pdf.convert_to_image,
        "image_convert_to_pdf": pdf.convert_image,
        "ocr_recognize_file": ocr.recognize_file,
        "shell_command": shell.command,
        "answer": AnswerApp(workspace).answer,
    }


def office_tools(workspace: Workspace) -> list[Any]:
    """Return the functions as tools. The model gets their errors as results."""
    return [tool(name=name)(function) for name, function in office_functions(workspace).items()]


def system_prompt(task: Task) -> str:
    """Return the system prompt, with the user, the date, and the folder."""
    return (
        f"Today is {task.date} ({task.weekday}). The current time is {task.time}. You are an assistant of {task.username}. "
        "Solve the task with the tools, step by step. The files of the task are in data/, calendars in calendar/NAME.ics, "
        "emails in emails/NAME/; look there before you begin. If the task is a question, give your answer with the tool "
        "`answer`. When you are done, say so in one sentence."
    )

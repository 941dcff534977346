"""Word files: read, made, continued, converted to PDF."""

from __future__ import annotations

import io
import re

from docx import Document
from docx.document import Document as WordDocument

from .. import documents
from ..errors import OfficeError
from ..workspace import Workspace
from .conversion import to_pdf

MAX_SHOWN = 20_000


class WordApp:
    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def read_file(self, file_path: str) -> str:
        """Read the text of a Word file.

        Args:
            file_path: The file, like data/report.docx
        """
        return documents.read_document(self._workspace.file(_word(file_path)))[:MAX_SHOWN] or "The file is empty."

    def create_file(self, file_path: str, text: str = "") -> str:
        """Make a new Word file; each line of the text becomes a paragraph.

        Args:
            file_path: The file, like data/report.docx
            text: What it says
        """
        self._save(file_path, _add(Document(), text))
        return f"Made {file_path}."

    def append_text(self, file_path: str, text: str) -> str:
        """Add text to the end of a Word file; each line becomes a paragraph.

        Args:
            file_path: The file
            text: What to add
        """
        self._save(file_path, _add(documents.load_document(self._workspace.file(_word(file_path))), text))
        return f"Added to {file_path}."

    def convert_to_pdf(self, file_path: str, pdf_file_path: str) -> str:
        """Make a PDF of a Word file.

        Args:
            file_path: The Word file
            pdf_file_path: The PDF, like data/report.pdf
        """
        text = documents.read_document(self._workspace.file(_word(file_path)))
        return to_pdf(self._workspace, file_path, pdf_file_path, text)

    def _save(self, file_path: str, document: WordDocument) -> None:
        buffer = io.BytesIO()
        document.save(buffer)
        self._workspace.write(_word(file_path), buffer.getvalue())


def _word(file_path: str) -> str:
    if not file_path.lower().endswith(".docx"):
        raise OfficeError(f"{file_path} is not the name of a Word file (.docx)")
    return file_path


def _add(document: WordDocument, text: str) -> WordDocument:
    if len(text) > 200_000:
        raise OfficeError("write at most 200000 characters at once")
    for line in re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", "", text).splitlines():
        document.add_paragraph(line)
    return document

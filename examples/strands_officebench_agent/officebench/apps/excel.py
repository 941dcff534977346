"""Excel files: read, written cell by cell or in rows, converted to PDF."""

from __future__ import annotations

import io
import re

import openpyxl
from openpyxl.worksheet.worksheet import Worksheet

from .. import documents
from ..errors import OfficeError
from ..workspace import Workspace
from .conversion import to_pdf

MAX_SHOWN = 20_000

Value = str | int | float | None


class ExcelApp:
    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def read_file(self, file_path: str, sheet: str = "") -> str:
        """Show the cells of an Excel file as (row, column): value, counted from 1.

        Args:
            file_path: The file, like data/score.xlsx
            sheet: Name of the sheet; default: the first
        """
        text = "\n".join(documents.read_sheet(self._workspace.file(_excel(file_path)), sheet or None).lines())
        return text[:MAX_SHOWN] or "The sheet is empty."

    def create_file(self, file_path: str) -> str:
        """Make an empty Excel file.

        Args:
            file_path: The file, like data/new.xlsx
        """
        self._save(file_path, openpyxl.Workbook())
        return f"Made {file_path}."

    def set_cell(self, file_path: str, row: int, column: int, value: Value) -> str:
        """Write one cell; text that is a number is written as a number.

        Args:
            file_path: The file
            row: Row from 1
            column: Column from 1
            value: What to write
        """
        return self.write_rows(file_path, row, [[value]], column)

    def write_rows(self, file_path: str, start_row: int, rows: list[list[Value]], start_column: int = 1) -> str:
        """Write several rows of cells over the present ones. Create the file if it does not exist.

        Args:
            file_path: The file
            start_row: Row of the first cell, from 1
            rows: The rows, each a list of values; null leaves a cell empty
            start_column: Column of the first cell, from 1
        """
        height, width = len(rows), max((len(cells) for cells in rows), default=0)
        if start_row < 1 or start_column < 1 or not height:
            raise OfficeError("rows and columns count from 1, and there must be something to write")
        if start_row + height - 1 > documents.MAX_ROWS or start_column + width - 1 > documents.MAX_COLUMNS:
            raise OfficeError(f"a sheet ends at row {documents.MAX_ROWS} and column {documents.MAX_COLUMNS}")
        there = self._workspace.path(_excel(file_path)).exists()
        workbook = self._load(file_path) if there else openpyxl.Workbook()
        sheet = _sheet(workbook)
        for row, cells in enumerate(rows, start_row):
            for column, value in enumerate(cells, start_column):
                sheet.cell(row, column).value = _typed(value)
        self._save(file_path, workbook)
        return f"Wrote {height} row{'s' if height > 1 else ''} to {file_path}."

    def delete_cell(self, file_path: str, row: int, column: int) -> str:
        """Empty one cell.

        Args:
            file_path: The file
            row: Row from 1
            column: Column from 1
        """
        return self._change(file_path, lambda sheet: setattr(sheet.cell(row, column), "value", None), row, column)

    def delete_row(self, file_path: str, row: int) -> str:
        """Remove one row; those below move up.

        Args:
            file_path: The file
            row: Row from 1
        """
        return self._change(file_path, lambda sheet: sheet.delete_rows(row), row, 1)

    def convert_to_pdf(self, file_path: str, pdf_file_path: str) -> str:
        """Make a PDF of an Excel file.

        Args:
            file_path: The Excel file
            pdf_file_path: The PDF, like data/score.pdf
        """
        sheet = documents.read_sheet(self._workspace.file(_excel(file_path)))
        lines = [
            "   ".join(sheet.text(row, column) or "" for column in range(1, sheet.columns + 1))
            for row in range(1, sheet.rows + 1)
        ]
        return to_pdf(self._workspace, file_path, pdf_file_path, "\n".join(lines))

    def _change(self, file_path: str, change: object, row: int, column: int) -> str:
        if not (1 <= row <= documents.MAX_ROWS and 1 <= column <= documents.MAX_COLUMNS):
            raise OfficeError(f"a sheet has rows 1 to {documents.MAX_ROWS} and columns 1 to {documents.MAX_COLUMNS}")
        workbook = self._load(file_path)
        change(_sheet(workbook))  # type: ignore[operator]
        self._save(file_path, workbook)
        return f"Changed {file_path}."

    def _load(self, file_path: str) -> openpyxl.Workbook:
        path = self._workspace.file(_excel(file_path))
        documents.read_sheet(path)  # within the bounds, before it is loaded whole
        return documents.load_workbook(path)

    def _save(self, file_path: str, workbook: openpyxl.Workbook) -> None:
        buffer = io.BytesIO()
        workbook.save(buffer)
        self._workspace.write(_excel(file_path), buffer.getvalue())


def _excel(file_path: str) -> str:
    if not file_path.lower().endswith(".xlsx"):
        raise OfficeError(f"{file_path} is not the name of an Excel file (.xlsx)")
    return file_path


def _sheet(workbook: openpyxl.Workbook) -> Worksheet:
    sheet = workbook.active
    if not isinstance(sheet, Worksheet):
        raise OfficeError("the first sheet holds no cells")
    return sheet


def _typed(value: Value) -> Value:
    if not isinstance(value, str):
        return value
    if len(value) > 32_767:
        raise OfficeError("a cell holds up to 32767 characters")
    text = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", "", value)
    if re.fullmatch(r"-?(0|[1-9]\d{0,14})", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?(0|[1-9]\d{0,14})\.\d{1,12}", text) else text

"""Convert office files to PDF with LibreOffice. Without LibreOffice, write plain pages of their text."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import fpdf

from ..errors import OfficeError
from ..workspace import Workspace

LIBREOFFICE_S = 120.0
_FONT = Path("/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf")


@cache
def libreoffice() -> str | None:
    """The program that converts, if it is installed."""
    return shutil.which("soffice") or shutil.which("libreoffice")


def to_pdf(workspace: Workspace, file_path: str, pdf_file_path: str, text: str) -> str:
    """Write the PDF of an Office file; `text` is what it says, used if LibreOffice is missing.

    Raises: OfficeError.
    """
    if not pdf_file_path.lower().endswith(".pdf"):
        raise OfficeError(f"{pdf_file_path} is not the name of a PDF (.pdf)")
    program = libreoffice()
    workspace.write(pdf_file_path, _converted(program, workspace.file(file_path)) if program else text_pdf(text))
    return f"Made {pdf_file_path}" + ("." if program else ", with the text of the file; its layout needs LibreOffice.")


def _converted(program: str, path: Path) -> bytes:
    with tempfile.TemporaryDirectory(prefix="officebench-libreoffice-") as folder:
        command = [program, f"-env:UserInstallation=file://{folder}/profile", "--headless", "--norestore"]
        command += ["--convert-to", "pdf", "--outdir", folder, str(path)]
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", ""), "HOME": folder},
                timeout=LIBREOFFICE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise OfficeError(f"LibreOffice did not finish within {LIBREOFFICE_S:.0f} s") from None
        made = Path(folder, f"{path.stem}.pdf")
        if not made.is_file():
            raise OfficeError(f"LibreOffice could not convert {path.name}")
        return made.read_bytes()


def text_pdf(text: str) -> bytes:
    """A PDF of plain pages. Without a font of the system, characters outside Latin-1 become question marks."""
    pdf = fpdf.FPDF()
    pdf.set_auto_page_break(True, margin=15)
    pdf.add_page()
    if _FONT.is_file():
        pdf.add_font("text", fname=str(_FONT))
        pdf.set_font("text", size=11)
    else:
        pdf.set_font("Helvetica", size=11)
        text = text.encode("latin-1", errors="replace").decode("latin-1")
    pdf.multi_cell(0, 6, text or " ", wrapmode="CHAR" if _has_long_words(text) else "WORD", align="L")
    return bytes(pdf.output())


def _has_long_words(text: str) -> bool:
    """A word wider than the page cannot be laid out by words."""
    return any(len(word) > 60 for word in text.split())

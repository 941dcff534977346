"""The text in an image, by Tesseract where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess

from ..errors import OfficeError
from ..workspace import Workspace
from .pdf import open_image

TESSERACT_S = 120.0
MAX_SHOWN = 20_000


class OcrApp:
    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def recognize_file(self, file_path: str) -> str:
        """Read the text in an image.

        Args:
            file_path: The image, like data/card.jpg
        """
        open_image(self._workspace, file_path)  # measured and decoded within bounds first
        program = shutil.which("tesseract")
        if program is None:
            raise OfficeError("text in images cannot be read here: Tesseract is not installed")
        try:
            done = subprocess.run(
                [program, str(self._workspace.file(file_path)), "stdout"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={**os.environ, "OMP_THREAD_LIMIT": "1"},
                timeout=TESSERACT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise OfficeError(f"reading {file_path} took longer than {TESSERACT_S:.0f} s") from None
        if done.returncode:
            raise OfficeError(f"{file_path} could not be read: {done.stderr.decode(errors='replace')[-200:]}")
        return done.stdout.decode(errors="replace").strip()[:MAX_SHOWN] or "The image has no text."

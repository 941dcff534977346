"""Removes the folders of ended sessions."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def remove(folder: Path) -> bool:
    """Remove a folder and all that is in it, also what its owner may not write to. Blocks. Returns: whether it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for inner, _, _ in os.walk(folder):  # from the top, so that each is open when it is gone into
            with contextlib.suppress(OSError):
                os.chmod(inner, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()

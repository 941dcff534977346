"""Take the pictures of the viewer: `python scripts/pictures/viewer.py RUN FOLDER` writes view-run.png and view-rollout.png.

The run is exported as a file and opened in Chromium, so the pictures show what a user sees. Needs Chromium on the PATH.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SIZE = {"width": 1280, "height": 900}


def take(run: Path, folder: Path) -> None:
    """Write both pictures of a run into the folder."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as made, sync_playwright() as driver:
        exported = Path(made) / "run.html"
        command = [sys.executable, "-m", "agentcore_rl_toolkit", "view", str(run), "--export", str(exported)]
        subprocess.run(command, check=True)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(exported.as_uri())
        page.click("#page table a:text-is('train 2')")  # the rollouts of a step, the lowest reward first
        page.click(".rows .row >> nth=0")
        page.click("#least")  # the least likely token, in the view of tokens
        page.wait_for_selector(".tokens .picked")
        page.screenshot(path=folder / "view-rollout.png")
        page.goto("about:blank")
        page.goto(exported.as_uri())
        page.wait_for_selector("#page table a:text-is('train 2')")
        page.screenshot(path=folder / "view-run.png")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    options = parser.parse_args()
    take(options.run, options.folder)


if __name__ == "__main__":
    main()

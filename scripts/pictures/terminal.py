"""Record a command in a terminal as an animated SVG: `python scripts/pictures/terminal.py OUT.svg -- COMMAND ...`.

The command runs in a pseudo-terminal. pyte interprets its output, as a terminal does, and the screen is kept once per second of
the animation's time. Each line of text is one element with the times at which it is visible, so a line that does not change is
written once. A viewer that shows no animation shows the last screen. Needs `pip install pyte`.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    import pyte

CHARACTER, LINE, EDGE, BAR = 8.4, 18, 16, 32  # pixels: a character's width, a line's height, the margin, the title bar
FRAMES_PER_S = 4
HOLD_S = 8.0  # how long the last screen stays
COLORS = {
    "default": "#e6edf3",
    "black": "#8b949e",
    "brightblack": "#8b949e",
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
    "white": "#e6edf3",
}

Run = tuple[int, str, str, bool]  # the first column, the text, its color, bold
Row = tuple[Run, ...]


def row_of(screen: pyte.Screen, y: int) -> Row:
    """Return a line of the screen as runs of one style, without the blanks at its ends."""
    row = []
    for (color, bold), cells in itertools.groupby(
        ((x, screen.buffer[y][x]) for x in range(screen.columns)), key=lambda cell: (cell[1].fg, cell[1].bold)
    ):
        chars = list(cells)
        text = "".join(char.data for _, char in chars)
        if text.strip():
            first = chars[0][0] + len(text) - len(text.lstrip())
            row.append((first, text.strip(), COLORS.get(color, f"#{color}"), bold))
    return tuple(row)


def record(command: Sequence[str], columns: int, rows: int, prompt: str) -> tuple[list[tuple[float, list[Row]]], float]:
    """Run the command in a terminal of this size. Return (seconds since the start, screen) per change, and all seconds."""
    import pyte  # only `make pictures` installs it

    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    stream.feed(f"\x1b[32m$\x1b[0m {prompt}\r\n".encode())
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    own = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }  # `make pictures` runs this
    environment = {**own, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
    began = time.monotonic()
    running = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True)
    os.close(theirs)
    frames = [(0.0, [row_of(screen, y) for y in range(rows)])]
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # EIO: the last process with the terminal has ended
            break
        if not data:
            break
        stream.feed(data)
        if time.monotonic() - began - frames[-1][0] > 0.2:
            frames.append((time.monotonic() - began, [row_of(screen, y) for y in range(rows)]))
    took = time.monotonic() - began
    frames.append((took, [row_of(screen, y) for y in range(rows)]))
    if running.wait() != 0:
        sys.exit(f"{' '.join(command)} ended with exit code {running.returncode}")
    return frames, took


def spans(frames: Sequence[tuple[float, list[Row]]], speed: float) -> list[tuple[int, Row, float, float]]:
    """Return (line, its text, from, to) in seconds of the animation. The last screen's lines end at infinity."""
    kept = [frames[0]]
    for frame in frames[1:-1]:
        if (frame[0] - kept[-1][0]) / speed >= 1 / FRAMES_PER_S:
            kept.append(frame)
    kept.append(frames[-1])
    found = []
    for y in range(len(kept[0][1])):
        since = 0
        for i in range(1, len(kept) + 1):
            if i == len(kept) or kept[i][1][y] != kept[since][1][y]:
                end = float("inf") if i == len(kept) else kept[i][0] / speed
                if kept[since][1][y]:
                    found.append((y, kept[since][1][y], kept[since][0] / speed, end))
                since = i
    return found


def picture(lines: Sequence[tuple[int, Row, float, float]], columns: int, rows: int, shown_s: float, title: str) -> str:
    """Return the SVG. ``shown_s`` is how long the animation takes without the hold at its end."""
    whole_s = shown_s + HOLD_S
    width, height = columns * CHARACTER + 2 * EDGE, rows * LINE + BAR + EDGE
    moments: dict[tuple[float, float], str] = {}
    body, rules = [], []
    for y, row, begin, end in lines:
        name = moments.setdefault((begin, end), f"t{len(moments)}")
        parts = "".join(
            f'<tspan x="{EDGE + x * CHARACTER:.1f}" textLength="{len(text) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs"'
            f' fill="{color}"{" font-weight=" + chr(34) + "600" + chr(34) if bold else ""}>{escape(text)}</tspan>'
            for x, text, color, bold in row
        )
        last = " z" if end == float("inf") else ""
        body.append(f'<text class="{name}{last}" y="{BAR + (y + 0.8) * LINE:.1f}">{parts}</text>')
    for (begin, end), name in moments.items():
        on = 100 * begin / whole_s
        hidden = f"0%,{on:.2f}%{{visibility:hidden}}" if begin else ""
        until = "" if end == float("inf") else f"{100 * end / whole_s:.2f}%,100%{{visibility:hidden}}"
        after = on + 0.01 if begin else 0
        rules.append(
            f"@keyframes {name}{{{hidden}{after:.2f}%{{visibility:visible}}{until}}}.{name}{{animation-name:{name}}}"
        )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img">
<title>{escape(title)}</title>
<style>
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre;visibility:hidden;
animation:{whole_s:.1f}s step-end infinite}}
.z{{visibility:visible}}
.title{{visibility:visible;animation:none;fill:#8b949e;text-anchor:middle}}
@media (prefers-reduced-motion:reduce){{text{{animation:none}}}}
{"".join(rules)}
</style>
<rect width="100%" height="100%" rx="8" fill="#0d1117" stroke="#30363d"/>
<circle cx="18" cy="16" r="5" fill="#ff5f57"/><circle cx="36" cy="16" r="5" fill="#febc2e"/>
<circle cx="54" cy="16" r="5" fill="#28c840"/>
<text class="title" x="50%" y="21">{escape(title)}</text>
{chr(10).join(body)}
</svg>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="where the picture goes")
    parser.add_argument("command", nargs="+", help="the command, after --")
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the animation takes (20)")
    options = parser.parse_args()
    words = " ".join(options.command)
    frames, took = record(options.command, options.columns, options.rows, words)
    speed = max(1.0, took / options.seconds)
    title = f"{words} ({took:.0f} seconds, shown {speed:.0f} times as fast)" if speed > 1.5 else words
    picture_of = picture(spans(frames, speed), options.columns, options.rows, took / speed, title)
    options.out.write_text(picture_of)
    print(f"{options.out}: {len(picture_of) / 1000:.0f} kB")


if __name__ == "__main__":
    main()

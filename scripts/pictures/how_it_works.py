"""Draw the parts of the system and what passes between them: `python scripts/pictures/how_it_works.py OUT.svg`.

The drawing is 400 pixels wide, so that a phone shows its text at full size.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 408, 440
# A box: left, top, width, height, its name, and what else stands in it.
BOXES = (
    (28, 12, 352, 64, "Trainer", ("built-in loop, TRL, slime, verl, rLLM,", "Tinker, or SageMaker")),
    (28, 140, 170, 124, "AgentCore Runtime", ("on AWS or on this machine",)),
    (
        234,
        140,
        146,
        124,
        "Model gateway",
        ("OpenAI, Anthropic,", "Bedrock, Gemini", "", "records the exact", "token ids"),
    ),
    (28, 340, 170, 84, "Object store", ("S3, or a folder:", "result and reward", "of each rollout")),
    (234, 340, 146, 84, "Engine", ("your open model in", "vLLM, SGLang, Tinker,", "or built in")),
)
# An arrow: its path, where its number stands, the number, and a word at the right (start) or left (end) of it.
ARROWS = (
    ("M116 76V134", 116, 104, "1", "rollouts", "start"),
    ("M198 202H228", 212, 202, "2", "", "start"),
    ("M307 264V334", 307, 298, "3", "token ids", "start"),
    ("M116 264V334", 116, 298, "4", "results", "start"),
    ("M28 382H14V44H22", 14, 108, "5", "rewards", "start"),
    ("M307 140V82", 307, 110, "6", "tokens", "end"),
    ("M380 44H394V382H386", 394, 108, "7", "weights", "end"),
)


def picture() -> str:
    """Return the SVG."""
    parts = []
    for left, top, width, height, name, lines in BOXES:
        parts.append(f'<rect class="box" x="{left}" y="{top}" width="{width}" height="{height}" rx="6"/>')
        parts.append(f'<text class="name" x="{left + width / 2}" y="{top + 22}">{escape(name)}</text>')
        for i, line in enumerate(lines):
            parts.append(f'<text x="{left + width / 2}" y="{top + 41 + 16 * i}">{escape(line)}</text>')
    for i in range(3):  # sessions: one process or microVM per rollout
        parts.append(f'<rect class="agent" x="{35 + 53 * i}" y="194" width="48" height="56" rx="4"/>')
        parts.append(f'<text x="{59 + 53 * i}" y="219">your</text><text x="{59 + 53 * i}" y="235">agent</text>')
    for path, x, y, number, word, side in ARROWS:
        parts.append(f'<path class="arrow" d="{path}" marker-end="url(#head)"/>')
        parts.append(
            f'<circle class="dot" cx="{x}" cy="{y}" r="10"/><text class="number" x="{x}" y="{y + 4.5}">{number}</text>'
        )
        at = x + 15 if side == "start" else x - 15
        parts.append(f'<text class="word" x="{at}" y="{y + 4.5}" text-anchor="{side}">{word}</text>')
    title = "How a training step works: the trainer, AgentCore Runtime, the gateway, the engine and the object store"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">
<title>{escape(title)}</title>
<style>
svg{{--page:#ffffff;--text:#1f2328;--box:#f6f8fa;--edge:#818b98;--line:#0969da;--agent:#ddf4ff;--on:#ffffff}}
@media (prefers-color-scheme:dark){{
svg{{--page:#0d1117;--text:#f0f6fc;--box:#151b23;--edge:#656c76;--line:#58a6ff;--agent:#121d2f;--on:#0d1117}}}}
text{{font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:var(--text)}}
text:not(.word){{text-anchor:middle}}
.name{{font-size:14px;font-weight:600}}
.page{{fill:var(--page)}}
.box{{fill:var(--box);stroke:var(--edge)}}
.agent{{fill:var(--agent);stroke:var(--line)}}
.arrow{{stroke:var(--line);stroke-width:2;fill:none}}
.dot,.head{{fill:var(--line)}}
.number{{fill:var(--on);font-weight:700}}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="5" markerHeight="5" orient="auto">
<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>
<rect class="page" width="100%" height="100%" rx="8"/>
{chr(10).join(parts)}
</svg>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="where the picture goes")
    parser.parse_args().out.write_text(picture())


if __name__ == "__main__":
    main()

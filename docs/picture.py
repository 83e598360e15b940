"""Draw the picture of the README: what one window sends, without and with accumulation.

    python docs/picture.py            writes docs/window.svg
    python docs/picture.py --check    exits with 1 if docs/window.svg is not what would be written

The same bytes every time: no dates, no random numbers, no fonts that have to be there. The picture brings its own light
background, because a README is read on a white page and on a black one.
"""

from __future__ import annotations

import sys
from pathlib import Path

OUTPUT = Path(__file__).with_name("window.svg")
MICROBATCHES = 4
RANKS = 2

WIDTH, HEIGHT = 900, 372
LEFT = 96  # where time begins
COMPUTE, REDUCE, STEP = 92, 88, 40  # how long each lasts, in pixels
ROW, GAP = 34, 8  # a rank's bar, and the space below it

INK, QUIET, LINE = "#1f2328", "#57606a", "#d0d7de"
FILLS = {"compute": "#9ec5f4", "reduce": "#b4491a", "step": "#57606a"}


def text(
    x: float, y: float, words: str, *, size: int = 14, fill: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    """A line of text whose baseline is at ``y``."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>{words}</text>'


def box(kind: str, x: float, y: float, width: float, height: float, label: str) -> list[str]:
    """A bar with its label in the middle."""
    ink = INK if kind == "compute" else "#ffffff"
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{width - 2:g}" height="{height:g}" rx="4" fill="{FILLS[kind]}"/>',
        text(x + width / 2 - 1, y + height / 2 + 5, label, size=13, fill=ink, anchor="middle"),
    ]


def lane(top: float, title: str, note: str, *, reduce_each: bool) -> tuple[list[str], float]:
    """One loop on all ranks, over time; returns the shapes and where the window ends."""
    shapes = [text(24, top, title, size=16, bold=True), text(24, top + 20, note, fill=QUIET)]
    top += 34
    both = RANKS * ROW + (RANKS - 1) * GAP
    shapes += [text(24, top + rank * (ROW + GAP) + 22, f"rank {rank}", size=13, fill=QUIET) for rank in range(RANKS)]
    x: float = LEFT
    for index in range(MICROBATCHES):
        for rank in range(RANKS):
            shapes += box("compute", x, top + rank * (ROW + GAP), COMPUTE, ROW, f"micro {index + 1}")
        x += COMPUTE
        if reduce_each or index == MICROBATCHES - 1:
            shapes += box("reduce", x, top, REDUCE, both, "reduce")
            x += REDUCE
    for rank in range(RANKS):
        shapes += box("step", x, top + rank * (ROW + GAP), STEP, ROW, "step")
    return shapes, x + STEP


def draw() -> str:
    """The whole picture as SVG."""
    naive, late = lane(48, "A plain loop", "every backward reduces over the ranks", reduce_each=True)
    ours, early = lane(
        206, "The same loop with accumulate", "one reduction for the window, and the same gradient", reduce_each=False
    )
    saved = (early + late) / 2
    arrow = 280
    shapes = [
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" fill="#ffffff" stroke="{LINE}"/>',
        *naive,
        *ours,
        f'<path d="M{early + 8:g} {arrow} H{late:g}" stroke="{QUIET}" stroke-width="1.5" stroke-dasharray="5 4"/>',
        f'<path d="M{late:g} 232 V{316}" stroke="{QUIET}" stroke-width="1.5"/>',
        text(saved + 4, arrow - 10, "time that is not spent waiting", size=13, fill=QUIET, anchor="middle"),
        f'<path d="M{LEFT} 338 H{WIDTH - 30} m-7 -4 l7 4 l-7 4" stroke="{QUIET}" fill="none" stroke-width="1.5"/>',
        text(24, 343, "time", size=13, fill=QUIET),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif" role="img" '
        'aria-labelledby="title">'
    )
    title = (
        '<title id="title">Two ranks, four micro-batches. Above, every micro-batch is followed by a reduction; '
        "below, there is one reduction after the fourth, and the window ends sooner.</title>"
    )
    return "\n".join([head, title, *shapes, "</svg>"]) + "\n"


def main() -> int:
    """Write the picture, or check that it is up to date."""
    if "--check" not in sys.argv:
        OUTPUT.write_text(draw(), encoding="utf-8")
        print(f"wrote {OUTPUT}")
        return 0
    if OUTPUT.exists() and OUTPUT.read_text(encoding="utf-8") == draw():
        return 0
    print(f"{OUTPUT} is out of date: run python docs/picture.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())

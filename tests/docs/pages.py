"""The code blocks of README, CONTRIBUTING and docs/, so that each can be executed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Block", "blocks"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")])

_BLOCK = re.compile(
    r"""^(?:<!--\ command:\ (?P<command>\w+)\ -->\n)?     # who runs it instead of the tests: .ci/run
        ^```(?P<language>\w*)(?:\ title="(?P<title>[^"]+)")?\n
        (?P<code>.*?)
        ^```$""",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    code: str
    line: int
    title: str | None = None
    """The name of the file that it is, as the page shows it."""
    command: str | None = None
    """Its name, if .ci/run runs it."""


def blocks(page: Path) -> list[Block]:
    """Every block of a page, in order; raises for a fence that is not understood."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(m["language"], m["code"], text.count("\n", 0, m.start("code")) + 1, m["title"], m["command"])
        for m in _BLOCK.finditer(text)
    ]
    fences = len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE))
    if fences != 2 * len(found):
        raise ValueError(f"{page}: {fences} fences, but {len(found)} blocks were understood")
    return found

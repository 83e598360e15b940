"""Bring the tables in docs/ up to date: the arrangements that the conformance tests run, and the library's files.

python docs/tables.py            writes them into the pages
python docs/tables.py --check    exits with 1 if one is not up to date
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "accumulate"
TITLES = {
    "none": "No wrapper",
    "DDP": "DistributedDataParallel",
    "FSDP1": "FullyShardedDataParallel (FSDP1)",
    "FSDP2": "fully_shard (FSDP2)",
    "HSDP": "fully_shard on a 2-D mesh (HSDP)",
    "several": "Several models in one Accumulator",
}


def arrangements() -> str:
    """One section for each wrapper, one row for each arrangement."""
    sys.path.insert(0, str(DOCS.parent / "tests"))
    from distributed.arrangements import ARRANGEMENTS

    wrappers = dict.fromkeys(row.wrapper for row in ARRANGEMENTS)
    lines = [f"{len(ARRANGEMENTS)} arrangements.", ""]
    for wrapper in sorted(wrappers, key=list(TITLES).index):
        lines += [f"### {TITLES[wrapper]}", "", "| arrangement | what is special | ranks |", "| --- | --- | --- |"]
        lines += [f"| `{row.name}` | {row.about} | {row.world} |" for row in ARRANGEMENTS if row.wrapper == wrapper]
        lines.append("")
    return "\n".join(lines)


def files() -> str:
    """What each file of the library says it is for: the first paragraph of its docstring."""
    lines = ["| file | what it is for |", "| --- | --- |"]
    for file in sorted([*PACKAGE.glob("_[a-z]*.py"), *(PACKAGE / "wrappers").glob("[!_]*.py")]):
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        lines.append(f"| `{file.relative_to(PACKAGE)}` | {' '.join(docstring.partition(chr(10) * 2)[0].split())} |")
    return "\n".join([*lines, ""])


TABLES: dict[str, Callable[[], str]] = {"wrappers.md": arrangements, "design.md": files}


def updated(page: Path, make: Callable[[], str]) -> str:
    """The text of the page with the table between its two markers made anew."""
    begin, end = f"<!-- {make.__name__}:begin -->\n", f"<!-- {make.__name__}:end -->"
    head, opened, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, tail = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"{page} has no lines {begin!r} and {end!r}")
    return head + begin + make() + end + tail


def main() -> int:
    """Write the tables, or check them."""
    stale = 0
    for name, make in TABLES.items():
        page = DOCS / name
        text = updated(page, make)
        if "--check" not in sys.argv:
            page.write_text(text, encoding="utf-8")
        elif text != page.read_text(encoding="utf-8"):
            print(f"{page} is out of date: run python docs/tables.py")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())

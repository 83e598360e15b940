"""Bring docs/wrappers.md up to date with the arrangements that the conformance tests run.

python docs/support_table.py            writes the table into docs/wrappers.md
python docs/support_table.py --check    exits with 1 if it is not up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

PAGE = Path(__file__).with_name("wrappers.md")
BEGIN, END = "<!-- arrangements:begin -->\n", "<!-- arrangements:end -->"
TITLES = {
    "none": "No wrapper",
    "DDP": "DistributedDataParallel",
    "FSDP1": "FullyShardedDataParallel (FSDP1)",
    "FSDP2": "fully_shard (FSDP2)",
    "HSDP": "fully_shard on a 2-D mesh (HSDP)",
    "several": "Several models in one Accumulator",
}


def table() -> str:
    """One section for each wrapper, one row for each arrangement."""
    sys.path.insert(0, str(PAGE.parents[1] / "tests"))
    from distributed.arrangements import ARRANGEMENTS

    wrappers = dict.fromkeys(row.wrapper for row in ARRANGEMENTS)
    lines = [f"{len(ARRANGEMENTS)} arrangements.", ""]
    for wrapper in sorted(wrappers, key=list(TITLES).index):
        lines += [f"### {TITLES[wrapper]}", "", "| arrangement | what is special | ranks |", "| --- | --- | --- |"]
        lines += [f"| `{row.name}` | {row.about} | {row.world} |" for row in ARRANGEMENTS if row.wrapper == wrapper]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Write the table, or check it."""
    before = PAGE.read_text(encoding="utf-8")
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    after = head + BEGIN + table() + END + tail
    if "--check" not in sys.argv:
        PAGE.write_text(after, encoding="utf-8")
        return 0
    if after == before:
        return 0
    print(f"{PAGE} is out of date: run python docs/support_table.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Two hosts over a real, slow link: what crosses it is what the plan says, and nothing stays behind.

Needs root and the right to make network namespaces, so it is skipped where there is none.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from docs.pages import ROOT

SCRIPT = [sys.executable, str(ROOT / "benchmarks" / "two_hosts.py")]
TINY = ["--layers", "2", "--width", "128", "--batch", "1", "--rounds", "1"]


def missing() -> str:
    """Why no namespaces can be made here, or nothing."""
    if os.name != "posix" or os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return "needs root and iproute2"
    name = f"accumulate-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return f"no network namespaces here: {tried.stderr}" if tried.returncode else ""


WHY = missing()
hosts = pytest.mark.skipif(bool(WHY), reason=WHY or "-")


def left_behind(process: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"accumulate-{process}-")]


def command_lines() -> Iterator[str]:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            yield entry.read_text()


@hosts
@pytest.mark.slow
def test_what_crosses_the_link_is_what_the_plan_predicts(tmp_path: Path) -> None:
    command = [*SCRIPT, *TINY, "--rates", "1Gbit/s", "--steps", "1", "3", "--json", str(tmp_path / "rows.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as script:
        said, _ = script.communicate(timeout=240)
    assert script.returncode == 0, said
    rows: list[dict[str, Any]] = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["steps"], row["mode"]) for row in rows] == [
        (steps, mode) for steps in (1, 3) for mode in ("reduce_every", "no_sync", "accumulate")
    ]
    for row in rows:  # headers, acknowledgements and the barrier before each sample come on top
        assert 1 <= row["bytes"] / row["predicted_bytes"] < 1.03, row
    every, _, once = (row["predicted_bytes"] for row in rows[3:])
    assert every == 3 * once
    assert left_behind(script.pid) == []


@hosts
def test_ctrl_c_leaves_no_namespace_and_no_process(tmp_path: Path) -> None:
    command = [*SCRIPT, *TINY, "--steps", "512"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as script:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("accumulate-hosts-*/host1.log")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(left_behind(script.pid)) == 2
        script.send_signal(signal.SIGINT)
        _, said = script.communicate(timeout=60)
    assert (script.returncode, said) == (130, "two_hosts.py: interrupted; both hosts are gone\n")
    assert left_behind(script.pid) == []
    assert [line for line in command_lines() if f"acc{script.pid}." in line] == []


def test_without_its_tools_it_says_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run(
        SCRIPT, check=False, capture_output=True, text=True, env={**os.environ, "PATH": str(tmp_path)}
    )
    assert done.returncode == 1
    assert "two_hosts.py: " in done.stderr
    assert "iproute2" in done.stderr or "Linux" in done.stderr
    assert "Traceback" not in done.stderr

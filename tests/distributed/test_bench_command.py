"""The real command with real ranks at tiny sizes: what it prints, writes and counts, and how it ends.

No test looks at how fast anything was.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from accumulate.bench.ranks import RankError, Ranks

TINY = [
    "--ranks",
    "2",
    "--device",
    "cpu",
    "--data",
    "source",
    "--layers",
    "1",
    "--width",
    "32",
    "--heads",
    "2",
]
SHORT = [*TINY, "--tokens", "16", "--steps", "1", "2", "--rounds", "2"]
ENDLESS = [*TINY, "--tokens", "16", "--steps", "1", "--rounds", "1000000"]
COMMAND = [sys.executable, "-m", "accumulate", "bench"]


def bench(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=180, cwd=folder)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_the_table_and_the_json_hold_every_mode_with_the_bytes_that_were_reduced(wrapper: str, tmp_path: Path) -> None:
    ended = bench(*SHORT, "--wrapper", wrapper, "--json", "out.json", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for row in (
        "1 process ",
        "reduce every micro-batch",
        "hand-written no_sync",
        "2 processes, accumulate",
        "ceiling",
    ):
        assert row in ended.stdout
    assert "round 2/2, 2 steps" in ended.stderr
    assert "\x1b" not in ended.stdout + ended.stderr  # no terminal, no colour
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["rounds"] == 2
    assert document["wrapper"] == wrapper
    gradients = document["model"]["gradient_bytes"]
    counted = {(entry["mode"], entry["steps"]): entry["reduced_bytes_per_window"] for entry in document["results"]}
    assert counted == {
        **{("one_process", steps): 0 for steps in (1, 2)},
        **{("reduce_every", steps): steps * gradients for steps in (1, 2)},
        **{("no_sync", steps): gradients for steps in (1, 2)},
        **{("accumulate", steps): gradients for steps in (1, 2)},
        ("no_reduction", 2): 0,
    }
    assert all(len(entry["rates"]) == 2 and min(entry["rates"]) > 0 for entry in document["results"])


def test_json_on_stdout_stands_alone_and_plot_writes_a_png(tmp_path: Path) -> None:
    plot = ["--plot", "efficiency.png"] if importlib.util.find_spec("matplotlib") else []
    ended = bench(*SHORT, "--rounds", "1", "--json", "-", *plot, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout)
    assert sorted(document) == [
        "backend", "data", "loss", "machine", "model", "policy", "ranks", "results",
        "rounds", "seconds", "versions", "warnings", "wrapper",
    ]  # fmt: skip
    assert "WARNING: one round only" in ended.stderr
    if not plot:
        pytest.skip("matplotlib is not installed, so there is no picture to look at")
    content = (tmp_path / "efficiency.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(content) > 10_000


@contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """The command in the middle of its rounds, and the processes of its two ranks."""
    errors, home = folder / "stderr", {**os.environ, "TMPDIR": str(folder)}
    with (
        errors.open("w") as stream,
        subprocess.Popen([*COMMAND, *ENDLESS], stderr=stream, cwd=folder, env=home) as parent,
    ):
        try:
            deadline = time.monotonic() + 120
            while "round 2/" not in errors.read_text():
                assert parent.poll() is None, errors.read_text()
                assert time.monotonic() < deadline, errors.read_text()
                time.sleep(0.05)
            yield parent, children(parent.pid)
        finally:
            parent.kill()


def children(parent: int) -> list[int]:
    """The ranks of one run: children of the process that this test started, and nobody else's."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status, command = (entry / "stat").read_text(), (entry / "cmdline").read_text()
        except OSError:  # it ended meanwhile
            continue
        if int(status.rpartition(")")[2].split()[1]) == parent and "spawn_main" in command:
            found.append(int(entry.name))
    return sorted(found)


def gone(processes: list[int]) -> bool:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{process}").exists() for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_rank_that_raises_hands_its_traceback_to_the_parent() -> None:
    build: Any = divmod  # takes two arguments and will be given three
    with (
        pytest.raises(RankError, match=r"(?s)rank 0 failed while starting:.*TypeError: divmod"),
        Ranks(1, build, None, timeout=60),
    ):
        pass


def test_a_rank_that_does_not_answer_in_time_is_named() -> None:
    build: Any = divmod
    with (
        pytest.raises(RankError, match=r"no answer from rank 0, 1 within 0.01 s while starting"),
        Ranks(2, build, None, timeout=0.01),
    ):
        pass


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the ranks in /proc")


@linux
def test_a_rank_that_is_killed_ends_the_run_with_one_message(tmp_path: Path) -> None:
    with running(tmp_path) as (parent, ranks):
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        assert parent.wait(timeout=60) == 1
        assert gone(ranks)
    said = (tmp_path / "stderr").read_text()
    assert f"rank 1 (process {ranks[1]}) was killed by SIGKILL" in said
    assert "Traceback" not in said


@linux
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_stops_its_ranks_and_says_so(number: signal.Signals, status: int, tmp_path: Path) -> None:
    with running(tmp_path) as (parent, ranks):
        assert len(ranks) == 2
        parent.send_signal(number)
        assert parent.wait(timeout=60) == status
        assert gone(ranks)
    said = (tmp_path / "stderr").read_text()
    assert "all ranks were stopped" in said
    assert "Traceback" not in said


@linux
def test_ranks_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    with running(tmp_path) as (parent, ranks):
        assert len(ranks) == 2
        parent.kill()
        assert parent.wait(timeout=60) == -signal.SIGKILL
        assert gone(ranks)
    assert list(tmp_path.glob("accumulate-bench-*")) == []

"""Every code block of README, CONTRIBUTING and docs/ is executed, or is a command that .ci/run executes.

- A python block runs in the namespace of its page, which begins with what a reader has before the page (``before``).
- A python block with a title is a file of that name.
- A bash block runs in a folder that holds the page's files and the repository's examples.
- A text block is what the block before it printed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from docs.pages import PAGES, ROOT, Block, blocks


def before() -> dict[str, Any]:
    """What a reader has in his script already: a model, an optimizer, data."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    sizes = (3, 3, 3, 3, 2, 2, 1, 3)
    return {
        "__name__": "page",
        "torch": torch,
        "nn": nn,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": nn.functional.mse_loss,
        "loader": [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(8)],
        "ragged_loader": [(torch.randn(n, 4), torch.randn(n, 2), n) for n in (*sizes, 2)],
    }


class Reader:
    """Somebody who follows one page from top to bottom."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.page = page
        self.folder = folder
        self.namespace = before()
        self.printed: str | None = None
        (folder / "examples").symlink_to(ROOT / "examples")

    def follow(self, block: Block) -> None:
        """Do what this block says."""
        if block.command is not None:
            self.printed = None  # test_ci.py sees to these
        elif block.language == "text":
            assert block.code == self.printed, f"{self.page}:{block.line} is not what the block before printed"
        elif block.language == "python" and block.title is not None:
            (self.folder / block.title).write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            self.printed = self.run_python(block)
        elif block.language == "bash":
            self.printed = self.run_bash(block)
        else:
            pytest.fail(f"{self.page}:{block.line}: nothing executes a {block.language!r} block")

    def run_python(self, block: Block) -> str:
        code = compile("\n" * (block.line - 1) + block.code, str(self.page), "exec")  # tracebacks name the page's line
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, self.namespace)
        return printed.getvalue()

    def run_bash(self, block: Block) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code],
            check=False,
            cwd=self.folder,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert run.returncode == 0, f"{self.page}:{block.line} exited with {run.returncode}\n{run.stdout}\n{run.stderr}"
        return run.stdout


@pytest.mark.timeout(900)  # the README runs every example
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_a_page_does_what_the_page_says(page: Path, tmp_path: Path) -> None:
    reader = Reader(page, tmp_path)
    for block in blocks(page):
        reader.follow(block)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page} links to {target}"

"""What the pages tell people to run is what .ci/run runs, against the package that is installed."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

import pytest

import accumulate
from docs.pages import PAGES, ROOT, blocks

RUN = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_each_command_of_a_page_is_run_by_ci() -> None:
    taken = set(re.findall(r"\$\(command_of (\S+) (\w+)\)", RUN))
    given = {(str(page.relative_to(ROOT)), block.command) for page in PAGES for block in blocks(page) if block.command}
    assert given == taken


def test_the_tests_import_the_installed_package() -> None:
    if os.environ.get("PYTHONPATH"):
        pytest.skip("PYTHONPATH is set, so somebody wants another copy")
    assert Path(accumulate.__file__).is_relative_to(sysconfig.get_path("purelib"))


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.name)
def test_an_example_says_how_to_run_it_as_the_readme_does(script: Path) -> None:
    command = f"python examples/{script.name}"
    assert f"\n    {command}\n" in script.read_text(encoding="utf-8")
    assert any(command in block.code for block in blocks(ROOT / "README.md"))

"""What scripts write into docs/ is what they would write now, and the pages name what there is."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import accumulate
from distributed.arrangements import ARRANGEMENTS
from docs.pages import ROOT


@pytest.mark.parametrize("script", ["docs/picture.py", "docs/tables.py"])
def test_the_output_of_a_script_is_up_to_date(script: str) -> None:
    run = subprocess.run([sys.executable, ROOT / script, "--check"], check=False, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "")


def test_the_reference_lists_every_public_name() -> None:
    listed = re.findall(
        r"^::: accumulate\.(\w+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted([*listed, "__version__"]) == sorted(accumulate.__all__)


def test_the_readme_names_every_wrapper_that_is_tested() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if line.startswith("|")]
    for wrapper in {row.wrapper for row in ARRANGEMENTS} - {"several"}:
        assert any(re.search(rf"\b{wrapper}\b", row.split("|")[1]) for row in rows), wrapper


def test_the_changelog_has_the_version() -> None:
    assert f"\n## {accumulate.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

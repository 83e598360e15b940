"""The list of mutants cannot rot: each edit still applies to one place, and each named test still exists."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from mutants import MUTANTS, TESTS, Mutant, package


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_to_exactly_one_place(mutant: Mutant) -> None:
    assert (package() / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_test_of_a_mutant_exists(mutant: Mutant) -> None:
    file, _, name = mutant.test.partition("::")
    assert re.search(rf"^def {re.escape(name.partition('[')[0])}\(", (TESTS / file).read_text(), re.MULTILINE)


def test_no_two_mutants_have_one_name() -> None:
    assert [name for name, times in Counter(mutant.name for mutant in MUTANTS).items() if times > 1] == []

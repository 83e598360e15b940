"""What every test shares: the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.ranks import Pool, Worker, stop


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """``ranks(n)`` is a pool of n real ranks; all pools of a session share their workers, which start when
    first needed.
    """
    team: list[Worker] = []
    yield lambda world: Pool(world, team)
    stop(team)

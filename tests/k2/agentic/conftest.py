from collections.abc import Iterator
from typing import Any

import pytest

from k2.agentic import evolve, real


@pytest.fixture(scope="session")
def server() -> Iterator[real.RealTools]:
    with real.serve() as served:
        yield served


@pytest.fixture(scope="session")
def tools(server: real.RealTools) -> list[dict[str, Any]]:
    """Real tools and evolved ones of several generations."""
    return server.specifications + evolve.evolve(600, seed=3)

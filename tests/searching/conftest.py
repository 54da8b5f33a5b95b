"""A PostgreSQL server of the tests' own, on loopback."""

from collections.abc import Iterator

import pytest

from tests import postgresql as postgresql_server


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The URL of a fresh, empty database; skipped where PostgreSQL's server is not installed."""
    with postgresql_server.server() as url:
        yield url

"""A store of a fleet in SQLite and in a real PostgreSQL: the same tests on both.

Hashes of passwords are cheap in all tests of the fleet.
"""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgresql_fixtures import postgresql
from web_fixtures import SCRYPT_N

from toolkit.fleet.store import accounts
from toolkit.fleet.store.database import Database, open_database


@pytest.fixture(scope="module", autouse=True)
def product_scrypt_n() -> Iterator[int]:
    """The cost of the product's hashes of passwords; those of the tests are cheap."""
    with pytest.MonkeyPatch.context() as patch:
        cost = accounts._SCRYPT_N
        patch.setattr(accounts, "_SCRYPT_N", SCRYPT_N)
        yield cost


@pytest.fixture(scope="module")
def postgresql_server() -> Iterator[str]:
    with postgresql() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a new, empty store."""
    if request.param == "sqlite":
        return "sqlite:///fleet.db"
    import psycopg

    base = request.getfixturevalue("postgresql_server")
    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(base, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"{base.rpartition('/')[0]}/{name}"


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[Database]:
    database = open_database(url, tmp_path)
    yield database
    database.close()

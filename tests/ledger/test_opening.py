from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

import managed_e2b.ledger
from managed_e2b import ConfigError, LedgerError
from managed_e2b.ledger import open_engine
from managed_e2b.ledger.opening import HEAD
from managed_e2b.ledger.tables import metadata

MIGRATIONS = Path(managed_e2b.ledger.__file__).parent / "migrations"


def test_the_migrations_end_at_head() -> None:
    assert ScriptDirectory(str(MIGRATIONS)).get_heads() == [HEAD]


def test_a_migrated_ledger_is_what_the_tables_say(url: str) -> None:
    engine = open_engine(url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_a_ledger_is_opened_again_as_it_is(url: str) -> None:
    open_engine(url).dispose()
    engine = open_engine(url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == HEAD
    engine.dispose()


def test_a_newer_ledger_is_refused_and_left_alone(url: str) -> None:
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(LedgerError, match=r"newer managed-e2b .*upgrade managed-e2b"):
        open_engine(url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"
    engine.dispose()


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"'.*nowhere' does not exist; create it first"):
        open_engine(tmp_path / "nowhere" / "ledger.db")


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("these are my notes, and they are longer than a header of SQLite would be" * 20)
    before = file.read_bytes()
    with pytest.raises(LedgerError, match="not a ledger"):
        open_engine(file)
    assert file.read_bytes() == before


def test_a_foreign_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE orders (id INTEGER)")
    connection.close()
    with pytest.raises(LedgerError, match="not a managed-e2b ledger"):
        open_engine(file)
    connection = sqlite3.connect(file)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("orders",)]
    connection.close()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("", "db_path=''"),
        (None, "db_path=None"),
        (b"x.db", "db_path=b"),
        (":memory:", "must outlive the process"),
        ("mysql://somewhere/x", "not a database URL"),
        ("postgresql://u:secret@127.0.0.1:1/x", "cannot be reached"),
        ("postgresql://u:p@secret:word@127.0.0.1/x", "not a database URL"),
    ],
)
def test_what_cannot_be_a_ledger_is_told_without_secrets(path: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        open_engine(path)
    assert "secret" not in str(caught.value)


def test_a_directory_is_not_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="is a directory"):
        open_engine(tmp_path)

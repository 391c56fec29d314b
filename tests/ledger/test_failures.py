"""Whatever happens to the database while it is in use is a LedgerError that tells what to do, and no secret."""

from __future__ import annotations

import os
import sqlite3
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from managed_e2b import LedgerError
from managed_e2b.engine import host
from managed_e2b.ledger import Ledger, open_engine
from managed_e2b.models import State
from managed_e2b.rules.limits import Caps

CAPS = Caps(4)

CALLS: dict[str, Callable[[Ledger], object]] = {
    "beat": lambda book: book.beat("owner"),
    "records": lambda book: book.records(states_=[State.RUNNING]),
    "record": lambda book: book.record("ticket"),
    "turn": lambda book: book.turn("ticket", "owner", "account", CAPS),
    "look": lambda book: book.look("ticket", "owner", "account", CAPS),
    "claim": lambda book: book.claim("ticket", "owner", "why"),
    "close_owner": lambda book: book.close_owner("owner"),
    "known": lambda book: book.known(["ticket"], []),
}


def opened(url: str) -> Ledger:
    book = Ledger(open_engine(url))
    book.open_owner("owner", host.here(), os.getpid(), 1, "test", 600_000_000)
    return book


def _remove(file: Path) -> None:
    file.unlink()


def _replace(file: Path) -> None:
    other = file.with_name("other.db")
    open_engine(other).dispose()
    other.replace(file)


def _overwrite(file: Path) -> None:
    for name in (file.name, f"{file.name}-wal", f"{file.name}-shm"):
        if (part := file.with_name(name)).exists():
            part.write_bytes(b"no database " * 1000)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("harm", [_remove, _replace, _overwrite])
def test_a_file_that_is_gone_replaced_or_broken(tmp_path: Path, harm: Callable[[Path], None], call: str) -> None:
    file = tmp_path / "ledger.db"
    book = opened(str(file))
    book.close()  # the next connection is a new one
    harm(file)
    with pytest.raises(LedgerError, match=r"ledger\.db"):
        CALLS[call](book)
    book.close()
    assert file.exists() == (harm is not _remove), "nothing is made anew in its place"


@pytest.mark.parametrize("harm", [_remove, _replace])
def test_a_connection_that_is_open_to_a_file_that_is_no_more_is_not_used(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    file = tmp_path / "ledger.db"
    book = opened(str(file))
    harm(file)
    with pytest.raises(LedgerError, match=r"removed|replaced"):
        book.beat("owner")
    book.close()


def test_it_is_used_again_once_it_is_back(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    book = opened(str(file))
    file.rename(tmp_path / "elsewhere.db")
    with pytest.raises(LedgerError, match="removed"):
        book.beat("owner")
    (tmp_path / "elsewhere.db").rename(file)
    assert book.beat("owner")
    book.close()


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "ledger.db")
    book = Ledger(engine)
    with engine.connect() as connection:
        pages = connection.execute(text("PRAGMA page_count")).scalar_one()
        connection.execute(text(f"PRAGMA max_page_count = {pages}"))  # of this connection, which the pool has kept
    with pytest.raises(LedgerError, match=r"full.*disk"):
        book.open_owner("owner", host.here(), 1, 1, "x" * 1_000_000, 1)
    assert book.records() == []
    book.close()


def test_a_file_that_may_not_be_written(tmp_path: Path) -> None:
    book = opened(str(tmp_path / "ledger.db"))
    with book._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only = ON")  # root may write whatever the file's mode is
    with pytest.raises(LedgerError, match="readonly"):
        book.beat("owner")
    assert book.records() == []
    book.close()


def test_a_lock_that_somebody_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("managed_e2b.ledger.opening.BUSY_TIMEOUT", 0.05)
    book = opened(str(tmp_path / "ledger.db"))
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(LedgerError, match="locked"):
            book.beat("owner")
    finally:
        other.close()
    assert book.beat("owner")
    book.close()


def test_the_cause_is_kept(tmp_path: Path) -> None:
    book = opened(str(tmp_path / "ledger.db"))
    with book._engine.begin() as connection:
        connection.execute(text("DROP TABLE owners"))
    with pytest.raises(LedgerError, match="no such table") as caught:
        book.beat("owner")
    assert isinstance(caught.value.__cause__, OperationalError)
    book.close()


SECRET = "hunter2-is-a-secret"


def test_a_postgresql_that_goes_away_and_comes_back(postgres: str, tmp_path: Path) -> None:
    import psycopg

    root = Path(postgres.partition("host=")[2])
    name = f"failing_{uuid.uuid4().hex}"
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    link = tmp_path / ".s.PGSQL.5432"  # a way to the server that can be taken away
    link.symlink_to(root / link.name)
    book = opened(f"postgresql://me2b:{SECRET}@/{name}?host={tmp_path}&application_name={name}")
    link.unlink()
    book.close()
    for call in (*CALLS.values(), Ledger.now):
        with pytest.raises(LedgerError, match=rf"{name}: the ledger fails .*check that the database is up") as caught:
            call(book)
        assert SECRET not in "".join(traceback.format_exception(caught.value))
    link.symlink_to(root / link.name)
    assert book.beat("owner")
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", [name])
    assert book.beat("owner"), "a connection that was cut is replaced"
    book.close()


@pytest.mark.parametrize("place", ["me2b:{}@localhost:1/db", "localhost:1/db?user=me2b&password={}"])
def test_no_password_is_told_wherever_the_url_has_it(place: str) -> None:
    with pytest.raises(LedgerError) as caught:
        open_engine(f"postgresql://{place.format(SECRET)}")
    assert SECRET not in "".join(traceback.format_exception(caught.value))

"""Opening a ledger: the path or URL, the schema's version, and the pragmas that make SQLite safe under writers."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError

from ..errors import LedgerError
from .failing import cause_of, name_of
from .forking import close_at_fork, unforked

HEAD = "0003"
"""The newest revision in `migrations/versions`; a test holds the two together."""

READ_ONLY = "me2b_read_only"
"""Execution option of a connection that only reads: it does not wait for writers."""

BUSY_TIMEOUT = 30.0
"""Seconds that a writer waits for another's transaction, and PostgreSQL for a network that swallows what is sent."""

CONNECT_TIMEOUT = 10
"""Seconds for PostgreSQL to let us in; its URL may say another number (`?connect_timeout=`)."""

_BUSY_PAUSE = (0.0005, 0.006)
"""Seconds between two tries to begin to write: about as long as a few transactions take."""


def open_engine(db_path: str | os.PathLike[str]) -> Engine:
    """An engine on a ledger of this code's version; made or upgraded when it is new or older.

    `db_path` is a file for SQLite, or a URL (`postgresql+psycopg://…`). Raises LedgerError, telling what to do.
    """
    url = _url(db_path)
    try:
        engine = _sqlite(url) if url.get_backend_name() == "sqlite" else _postgres(url)
    except ModuleNotFoundError as error:
        raise LedgerError("PostgreSQL needs a driver: pip install 'managed-e2b[postgres]'") from error
    try:
        with unforked():
            _bring_to_head(engine, url)
    except (DBAPIError, OSError) as error:
        engine.dispose()
        raise LedgerError(_explain(url, error)) from error
    except LedgerError:
        engine.dispose()
        raise
    return engine


def location(engine: Engine) -> str:
    """What another process gives `open_engine`, wherever it runs, to open the same ledger. May hold a password."""
    url = engine.url
    if url.get_backend_name() == "sqlite":
        url = url.set(database=os.path.abspath(url.database or ""))
    return url.render_as_string(hide_password=False)


def _url(db_path: str | os.PathLike[str]) -> URL:
    text_ = os.fspath(db_path) if isinstance(db_path, str | os.PathLike) else ""
    if not isinstance(text_, str) or not text_:
        raise LedgerError(f"db_path={db_path!r}: give a file for SQLite, or a postgresql:// URL")
    if "://" in text_:
        try:
            url = make_url(text_)
            if url.drivername in ("postgresql", "postgres"):
                url = url.set(drivername="postgresql+psycopg")
            backend = url.get_dialect().name
        except (ArgumentError, NoSuchModuleError, ValueError):
            backend = "unknown"
        if backend not in ("sqlite", "postgresql"):
            raise LedgerError("db_path is not a database URL this can use: sqlite:///FILE or postgresql://…")
    else:
        url = URL.create("sqlite", database=text_)
    if url.get_backend_name() == "sqlite":
        if not url.database or url.database == ":memory:":
            raise LedgerError("a ledger must outlive the process: give a file, not an in-memory database")
        file = Path(url.database)
        if not file.parent.is_dir():
            raise LedgerError(f"{file}: its directory {str(file.parent)!r} does not exist; create it first")
        if file.is_dir():
            raise LedgerError(f"{file} is a directory: give the file to keep the ledger in")
    return url


def _postgres(url: URL) -> Engine:
    # A server that is gone without a word must not hold up a heartbeat, or an exit, for the kernel's fifteen minutes.
    patience = {"connect_timeout": CONNECT_TIMEOUT, "tcp_user_timeout": int(BUSY_TIMEOUT * 1000)}
    # READ COMMITTED, whatever the server's default: a turn takes its lock first and must see what was committed before.
    return create_engine(
        url,
        pool_pre_ping=True,
        isolation_level="READ COMMITTED",
        hide_parameters=True,
        connect_args={name: value for name, value in patience.items() if name not in url.query},
    )


def _sqlite(url: URL) -> Engine:
    # Parameters stay out of errors: users' metadata is among them.
    engine = create_engine(
        url, hide_parameters=True, connect_args={"timeout": BUSY_TIMEOUT, "check_same_thread": False}
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # we begin transactions ourselves, see `begin`
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        # A killed process loses nothing; a host's power cut may lose the last commits, which the lease covers.
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        if connection.get_execution_options().get(READ_ONLY, False):
            connection.exec_driver_sql("BEGIN")
            return
        # IMMEDIATE: a transaction that reads and then writes never fails in the middle with "database is locked".
        if not _begin_soon(connection.connection.driver_connection):
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    close_at_fork(engine)
    return engine


def _begin_soon(connection: sqlite3.Connection) -> bool:
    """Begin to write as soon as no other does. False, and nothing is begun, after BUSY_TIMEOUT or another error.

    SQLite's own waiting sleeps up to 100 ms between two tries, however short the transactions: with many writers some
    would wait for seconds. It is for what is left: readers, and the moments in which a database is recovered.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT
    connection.execute("PRAGMA busy_timeout=0")
    try:
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return True
            except sqlite3.DatabaseError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:
                    return False
            if time.monotonic() >= deadline:
                return False
            time.sleep(random.uniform(*_BUSY_PAUSE))
    finally:
        connection.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT * 1000)}")


def _bring_to_head(engine: Engine, url: URL) -> None:
    version = _version(engine, url)
    if version == HEAD:
        return
    # Imported here only: opening an up-to-date ledger does not pay for the migration machinery.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if version is not None and version not in known:
        raise LedgerError(
            f"{name_of(url)} was written by a newer managed-e2b (schema {version}, this one knows up to {HEAD}): "
            "upgrade managed-e2b, or give another db_path"
        )
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('managed-e2b migration'))"))
        # Another process may have upgraded it while this one waited for the write lock.
        if _stored_version(connection) == HEAD:
            return
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _version(engine: Engine, url: URL) -> str | None:
    with engine.connect() as connection:
        tables = set(inspect(connection).get_table_names())
        if "alembic_version" in tables and "sandboxes" in tables:
            return _stored_version(connection)
        ours = url.get_backend_name() == "sqlite" and tables
        if ours or "sandboxes" in tables:
            raise LedgerError(f"{name_of(url)} is a database, but not a managed-e2b ledger: give another db_path")
        return None


def _stored_version(connection: Any) -> str | None:
    if "alembic_version" not in inspect(connection).get_table_names():
        return None
    version = connection.execute(select(text("version_num")).select_from(text("alembic_version"))).scalar()
    return str(version) if version is not None else None


def _explain(url: URL, error: Exception) -> str:
    name = name_of(url)
    cause = cause_of(error)
    if "not a database" in cause:
        return f"{name} is not a ledger (not an SQLite database): give another db_path"
    if isinstance(error, OperationalError) and url.get_backend_name() != "sqlite":
        return f"{name}: the database cannot be reached or refuses; check host, port, user and password"
    return f"{name}: the ledger cannot be opened ({cause}); check that file and directory are writable"

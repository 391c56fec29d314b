"""A database that fails while it is in use: told as LedgerError, with what to do, the cause, and no secret."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ..errors import LedgerError


class Place:
    """Where the ledger of an engine is. Made while the file is the one that was opened."""

    def __init__(self, engine: Engine) -> None:
        self._name = name_of(engine.url)
        self._file: str | None = None
        if engine.dialect.name == "sqlite" and os.path.exists(engine.url.database or ""):
            # Absolute, as the engine has it: a program may change its directory.
            self._file = os.path.abspath(engine.url.database or "")
        self._advice = (
            "check that the database is up and can be reached"
            if engine.dialect.name != "sqlite"
            else "check that its disk has room and works, and that file and directory are writable"
        )
        self._inode = self._look()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Whatever the database does wrong within this block is a LedgerError.

        So is a file that is not the one any more that was opened: a connection that is still open to that one would
        write what nobody ever sees, and a new one would make an empty file.
        """
        try:
            if self._look() != self._inode:
                raise LedgerError(
                    f"{self._name}: the ledger has been replaced by another file while it was in use; put the file "
                    "back that was there, or shut this lifecycle down and open another one"
                )
            yield
        except FileNotFoundError as error:
            raise LedgerError(
                f"{self._name}: the ledger has been removed while it was in use; put it back, or shut this lifecycle "
                "down and open another one"
            ) from error
        except (SQLAlchemyError, OSError) as error:
            raise LedgerError(f"{self._name}: the ledger fails ({cause_of(error)}); {self._advice}") from error

    def _look(self) -> int:
        return 0 if self._file is None else os.stat(self._file).st_ino


def name_of(url: URL) -> str:
    """How a database is called in errors. A URL's query may hold a password, too."""
    if url.get_backend_name() == "sqlite":
        return url.database or ""
    return url.set(query={}).render_as_string(hide_password=True)


def cause_of(error: Exception) -> str:
    """The first line of what a database, or the system, said: more of it may quote a row."""
    told = error.orig if isinstance(error, DBAPIError) else error
    return str(told).strip().partition("\n")[0] or type(told).__name__

"""The ledger's tests run on every database: SQLite, and a real PostgreSQL of the machine's."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


def _postgres_tool(name: str) -> str | None:
    found = shutil.which(name)
    if found:
        return found
    candidates = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(candidates[-1]) if candidates else None


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a private PostgreSQL server, on a Unix socket only."""
    initdb, pg_ctl = _postgres_tool("initdb"), _postgres_tool("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("no PostgreSQL server on this machine (initdb, pg_ctl): apt-get install postgresql")
    root = Path(tmp_path_factory.mktemp("pg", numbered=True))
    prefix: list[str] = []
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        account = next((name for name in ("postgres", "nobody") if _exists(name)), None)
        if account is None or shutil.which("runuser") is None:
            pytest.skip("PostgreSQL refuses to run as root, and there is no other user to run it")
        root = Path("/tmp") / f"me2b-pg-{uuid.uuid4().hex[:12]}"
        root.mkdir(mode=0o700)
        shutil.chown(root, account)
        prefix = ["runuser", "-u", account, "--"]
    data = root / "data"

    def call(*command: str) -> None:
        subprocess.run([*prefix, *command], check=True, cwd="/", stdout=subprocess.DEVNULL)

    try:
        call(initdb, "-D", str(data), "-U", "me2b", "-A", "trust", "--no-sync")
        call(pg_ctl, "-D", str(data), "-w", "-l", str(root / "log"), "-o", f"-k {root} -c listen_addresses=''", "start")
        try:
            yield f"postgresql://me2b@/postgres?host={root}"
        finally:
            call(pg_ctl, "-D", str(data), "-m", "immediate", "stop")
    finally:
        shutil.rmtree(root)


def _exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return str(tmp_path / "ledger.db")
    import psycopg

    server: str = request.getfixturevalue("postgres")
    name = f"ledger_{uuid.uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return server.replace("/postgres?", f"/{name}?")

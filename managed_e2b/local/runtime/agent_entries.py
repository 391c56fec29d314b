"""What the file agent tells of files and users. Runs inside the sandbox: stdlib only, all imports here.

Paths are bytes on this side, because names in a sandbox need not be UTF-8; `to_path` and `to_text` are the border.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Any

PASSWD = b"/etc/passwd"
GROUP = b"/etc/group"
ACCOUNTS_LIMIT = 1 << 20  # bytes of /etc/passwd and /etc/group that are heeded; both are the sandbox's own to write
XATTR_PREFIX = "user.e2b."
METADATA_LIMIT = 1 << 16  # bytes told of one file; uploads cannot store as much, but a process in the sandbox can
ID_LIMIT = 1 << 32
OPEN_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # nothing in a sandbox may make the agent wait
DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESRCH, errno.ENAMETOOLONG)


def to_path(value: object) -> bytes:
    """The path that a caller named. OSError(EINVAL) for what no system call would take."""
    if not isinstance(value, str) or not value.startswith("/"):
        raise OSError(errno.EINVAL, "the path is not absolute")
    if "\0" in value:
        raise OSError(errno.EINVAL, "the path has a NUL character")
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise OSError(errno.EINVAL, "the path cannot be encoded") from None


def to_text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def resolve(path: bytes, *, strict: bool = False) -> bytes:
    """The path with all links followed, by hand.

    The kernel alone would not do: with fs.protected_symlinks it refuses root the links that others made in /tmp.
    """
    try:
        return os.path.realpath(path, strict=strict)
    except RecursionError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None


def locate(path: bytes) -> bytes:
    """The path with all links but the last followed, for what acts on a link itself."""
    return os.path.join(resolve(os.path.dirname(path)), os.path.basename(path))


def is_gone(error: OSError) -> bool:
    """Whether this error means that the entry went away meanwhile, or lies deeper than a path can reach."""
    return error.errno in _GONE


def open_regular(path: bytes, flags: int, mode: int = 0) -> int:
    """Open a regular file and nothing else: no pipe, device or directory, whatever is put in its place meanwhile."""
    try:
        refuse_special(os.stat(path))
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    fd = os.open(path, flags | OPEN_FLAGS, mode)
    try:
        status = os.fstat(fd)
        refuse_special(status)
        if flags & os.O_ACCMODE != os.O_RDONLY and status.st_dev == os.stat(b"/proc").st_dev:
            # It would be the server that writes, and the kernel asks there what the writer may do to the system.
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    except OSError:
        os.close(fd)
        raise
    return fd


def refuse_special(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")


class Accounts:
    """The sandbox's own users and groups. Read again whenever their files have changed."""

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[tuple[int, ...], list[list[str]]]] = {}

    def user(self, name: str) -> dict[str, Any]:
        """OSError(ENOENT) when there is none of that name."""
        for fields in self._passwd():
            if fields[0] == name:
                gid = int(fields[3])
                groups = {int(group[2]) for group in self._group() if name in group[3].split(",")}
                return {
                    "name": name,
                    "uid": int(fields[2]),
                    "gid": gid,
                    "groups": sorted(groups | {gid}),
                    "home": fields[5] or "/",
                    "shell": fields[6] or "/bin/sh",
                }
        raise FileNotFoundError(errno.ENOENT, "no such user")

    def names(self) -> tuple[dict[str, str], dict[str, str]]:
        """User names by uid and group names by gid; the first entry of an id counts, as for getpwuid."""
        users = {fields[2]: fields[0] for fields in reversed(list(self._passwd()))}
        groups = {fields[2]: fields[0] for fields in reversed(list(self._group()))}
        return users, groups

    def _passwd(self) -> Iterator[list[str]]:
        return (f for f in self._records(PASSWD) if len(f) == 7 and _is_id(f[2]) and _is_id(f[3]))

    def _group(self) -> Iterator[list[str]]:
        return (f for f in self._records(GROUP) if len(f) == 4 and _is_id(f[2]))

    def _records(self, path: bytes) -> list[list[str]]:
        try:
            fd = open_regular(path, os.O_RDONLY)
        except OSError:
            return []  # no such file, or not one: nobody has a name
        try:
            status = os.fstat(fd)
            version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if path not in self._seen or self._seen[path][0] != version:
                lines = to_text(os.read(fd, ACCOUNTS_LIMIT)).splitlines()
                self._seen[path] = (version, [line.split(":") for line in lines])
            return self._seen[path][1]
        finally:
            os.close(fd)


def _is_id(text: str) -> bool:
    return text.isdecimal() and len(text) < 12 and int(text) < ID_LIMIT - 1  # the last one means "none" to the kernel


class Describer:
    """Entries as envd's EntryInfo wants them. One instance serves one call: it looks the names up once."""

    def __init__(self, accounts: Accounts) -> None:
        self._users, self._groups = accounts.names()

    def entry(self, path: bytes, shown: bytes | None = None) -> dict[str, Any]:
        """The entry at `path`, told as `shown`; of a link, type and mode are those of what it leads to."""
        status = os.lstat(path)
        kind, mode, target = _kind(status.st_mode), status.st_mode, None
        if stat.S_ISLNK(status.st_mode):
            kind, mode, target = _follow(path)
        shown = path if shown is None else shown
        return {
            "name": to_text(os.path.basename(shown) or b"/"),
            "path": to_text(shown),
            "type": kind,
            "directory": stat.S_ISDIR(status.st_mode),
            "size": status.st_size,
            "mode": mode & 0o777,
            "permissions": permissions_text(status.st_mode),
            "owner": self._users.get(str(status.st_uid), str(status.st_uid)),
            "group": self._groups.get(str(status.st_gid), str(status.st_gid)),
            "mtime_ns": status.st_mtime_ns,
            "target": target,
            "metadata": metadata(path) if kind else {},
        }


def weight(entry: dict[str, Any]) -> int:
    """At most about how many bytes of JSON an entry takes; each one that is not UTF-8 takes six there."""
    texts = [entry["name"], entry["path"], entry["target"] or "", *entry["metadata"], *entry["metadata"].values()]
    return 400 + 6 * sum(map(len, texts))


def _kind(mode: int) -> str:
    return "file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else ""


def _follow(path: bytes) -> tuple[str, int, str]:
    try:
        target = resolve(path, strict=True)
        mode = os.stat(target).st_mode
    except OSError:
        return "", 0, to_text(path)  # upstream names the link itself when it leads nowhere
    return _kind(mode), mode, to_text(target)


# Bits and letters of Go's os.FileMode, in its order: clients of envd get this text and not that of ls.
_SPECIAL = (
    (stat.S_ISDIR, "d"),
    (stat.S_ISLNK, "L"),
    (lambda mode: stat.S_ISBLK(mode) or stat.S_ISCHR(mode), "D"),
    (stat.S_ISFIFO, "p"),
    (stat.S_ISSOCK, "S"),
    (lambda mode: bool(mode & stat.S_ISUID), "u"),
    (lambda mode: bool(mode & stat.S_ISGID), "g"),
    (stat.S_ISCHR, "c"),
    (lambda mode: bool(mode & stat.S_ISVTX), "t"),
)


def permissions_text(mode: int) -> str:
    """Mode as text in Go's notation: `-rw-r--r--`, `drwxr-xr-x`, `Lrwxrwxrwx`, `dtrwxrwxrwx` for /tmp."""
    special = "".join(letter for test, letter in _SPECIAL if test(mode)) or "-"
    return special + "".join(letter if mode & (0o400 >> i) else "-" for i, letter in enumerate("rwxrwxrwx"))


def metadata(path: bytes | int) -> dict[str, str]:
    """User-defined metadata of a file; empty where there is none, or it cannot be read, or xattrs are not to be had."""
    try:
        names = os.listxattr(path)
    except OSError:
        return {}
    found: dict[str, str] = {}
    room = METADATA_LIMIT
    for name in names:
        if name.startswith(XATTR_PREFIX):
            with contextlib.suppress(OSError, UnicodeError):  # gone meanwhile, or bytes that are no text: not ours
                key = name.removeprefix(XATTR_PREFIX)
                value = os.getxattr(path, name)
                room -= len(key.encode()) + len(value)
                if room < 0:
                    break
                found[key] = value.decode()
    return found


def replace_metadata(fd: int, wanted: dict[str, str]) -> None:
    """Make `wanted` the whole metadata of an open file. OSError(EOPNOTSUPP) where xattrs are not to be had."""
    try:
        existing = [name for name in os.listxattr(fd) if name.startswith(XATTR_PREFIX)]
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP or wanted:
            raise
        return
    for name in existing:
        if name.removeprefix(XATTR_PREFIX) not in wanted:
            os.removexattr(fd, name)
    for key, value in wanted.items():
        os.setxattr(fd, XATTR_PREFIX + key, value.encode())

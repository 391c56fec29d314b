"""A layer of an OCI image becomes a directory that an overlay takes as one of its layers.

The archive comes from anywhere, so it is unpacked by a fork that has the sandboxes' ids and sees nothing but the new
directory: it has made that its root. What the archive says of removed files is written as an overlay in a user
namespace reads it. Device nodes are left out, which no sandbox may have; ids that are not mapped become root's.

Standard library only; runs in a fork of the spawner.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import importlib
import os
import resource
import shutil
import signal
import stat
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from managed_e2b.local.runtime import children, linux

try:
    _zstd: Any = importlib.import_module("compression.zstd")  # Python 3.14 has it
except ModuleNotFoundError:
    _zstd = None

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_OPAQUE_XATTR = "user.overlay.opaque"
_CAPABILITY_XATTR = "security.capability"
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BLOCK = 1 << 20
_NEW_FILE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
_MEMORY = 1 << 30  # more than the process has; an archive may claim a header of any length, which is read whole
_CPU_SECONDS = 900  # the largest layers take some minutes; some headers keep `tarfile` busy for days
_CPU_GRACE = 10  # to say so; whoever is too busy even for that is killed
# What `tarfile`, and the system calls with what it read, make of an archive that was forged. SystemError: Python 3.11
# calls it that, with no exception set, when there is no memory for the next frame of a deep call.
_DAMAGED = (
    tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError, OverflowError, RecursionError, MemoryError,
    SystemError,
)  # fmt: skip


@dataclass(frozen=True)
class Bounds:
    """What an archive may become: bytes of its files together, and entries."""

    size: int
    entries: int


@dataclass
class _Layer:
    """What is known of the layer while it is written. Paths are absolute, in the new root."""

    bounds: Bounds
    size: int = 0
    entries: int = 0
    left_out: int = 0
    removed: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)  # directories that are there, by the names they go by
    times: dict[str, float] = field(default_factory=dict)  # of directories: what is made in them changes it


def unpack(archive: int, directory: str, bounds: Bounds) -> dict[str, int]:
    """Unpack a tar archive, plain or compressed, into `directory/root`, both new; it is on disk when this returns.

    For a fork: its root is another one afterwards. Returns `size` in bytes, `entries`, and how many were `left_out`.
    Raises OSError: EINVAL for what is no such archive, EFBIG for one beyond its bounds or one that takes too long, and
    whatever a full disk says.
    """
    children.seal_imports()  # from now on what lies where modules do comes from the archive
    os.mkdir(directory, 0o755)
    root = f"{directory}/root"
    os.mkdir(root, 0o755)
    memory = _address_space() + _MEMORY
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.chroot(root)
    os.chdir("/")
    os.umask(0)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGXCPU, _too_long)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS + _CPU_GRACE))
    layer = _Layer(bounds)
    try:
        with _decompressed(archive) as stream, tarfile.open(fileobj=stream, mode="r|", bufsize=_BLOCK) as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
                _write(layer, tar, member)
    except _DAMAGED as error:
        raise OSError(errno.EINVAL, f"the layer is damaged: {error}") from error
    _finish(layer)
    linux.sync_filesystem(handle)
    os.close(handle)
    return {"size": layer.size, "entries": layer.entries, "left_out": layer.left_out}


def _address_space() -> int:
    """Bytes that this process has already, which its limit counts: as many as the process it was forked from."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _too_long(number: int, frame: object) -> NoReturn:
    raise OSError(errno.EFBIG, "the layer takes too long to unpack")


@contextlib.contextmanager
def _decompressed(archive: int) -> Iterator[Any]:
    with os.fdopen(archive, "rb", closefd=False) as raw:
        magic = raw.peek(4)[:4]
        if magic.startswith(_GZIP):
            with gzip.GzipFile(fileobj=raw, mode="rb") as stream:
                yield stream
        elif magic == _ZSTD:
            if _zstd is None:
                message = "the layer is compressed with zstd: run the server with Python 3.14 or newer for such images"
                raise OSError(errno.EOPNOTSUPP, message)
            with _zstd.ZstdFile(raw) as stream:
                yield stream
        else:
            yield raw


def _write(layer: _Layer, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    layer.entries += 1
    if layer.entries > layer.bounds.entries:
        raise OSError(errno.EFBIG, f"the layer has more than {layer.bounds.entries} entries")
    if member.size < 0:
        raise OSError(errno.EINVAL, "the layer has a file of less than no bytes")
    layer.size += 0 if member.isdir() else member.size
    if layer.size > layer.bounds.size:
        raise OSError(errno.EFBIG, f"the layer has more than {layer.bounds.size} bytes")
    path = _inside(member.name)
    if path == "/":
        return
    parent, name = os.path.split(path)
    if name == _OPAQUE:
        layer.opaque.append(parent)
        return
    if name.startswith(_WHITEOUT * 2):
        return  # a builder's own notes
    if name.startswith(_WHITEOUT):
        layer.removed.append(os.path.join(parent, name.removeprefix(_WHITEOUT)))
        return
    path = os.path.join(_parent(layer, parent), name)
    if member.isdir():
        _make_directory(layer, path)
        layer.times[path] = member.mtime
    elif member.isreg():
        _write_file(layer, tar, member, path)
        return
    else:
        _clear(layer, path)
        if member.issym():
            os.symlink(member.linkname, path)
        elif member.islnk():
            os.link(_inside(member.linkname), path, follow_symlinks=False)
            return  # what it is of has its owner already
        elif member.isfifo():
            os.mkfifo(path)
        else:
            layer.left_out += 1
            return
    _dress(member, path)


def _inside(name: str) -> str:
    """An absolute path; `..` leads nowhere but to the root."""
    if "\0" in name:
        raise OSError(errno.EINVAL, "the layer has a name with a zero byte")
    return "/" + os.path.normpath("/" + name).lstrip("/")


def _parent(layer: _Layer, path: str) -> str:
    """Where that directory is; made if it is not there. A link may lead to what only a layer below has."""
    found = layer.parents.get(path)
    if found is None:
        found = layer.parents[path] = os.path.realpath(path)
        os.makedirs(found, 0o755, exist_ok=True)
    return found


def _make_directory(layer: _Layer, path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            _clear(layer, path)
            os.mkdir(path)


def _clear(layer: _Layer, path: str) -> None:
    """An archive may hold a name twice: the last one counts."""
    layer.parents.clear()  # what was there may have been a directory, or a link to one
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        shutil.rmtree(path)


def _write_file(layer: _Layer, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    try:
        fd = os.open(path, _NEW_FILE, 0o600)
    except FileExistsError:
        _clear(layer, path)
        fd = os.open(path, _NEW_FILE, 0o600)
    source = tar.extractfile(member)
    with os.fdopen(fd, "wb") as target:
        if source is not None:
            shutil.copyfileobj(source, target, _BLOCK)
        target.flush()
        _dress(member, fd)


def _dress(member: tarfile.TarInfo, path: str | int) -> None:
    """Owner, mode (after the owner, whose change takes setuid away), capabilities, time. `path` or a descriptor."""
    try:
        _chown(path, member.uid, member.gid)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM, errno.EOVERFLOW):
            raise
        _chown(path, 0, 0)
    if member.issym():
        return
    os.chmod(path, member.mode & 0o7777)
    capability = member.pax_headers.get(f"SCHILY.xattr.{_CAPABILITY_XATTR}")
    if capability is not None and member.isreg():
        with contextlib.suppress(OSError):  # a filesystem or a kernel without: the program runs without them
            os.setxattr(path, _CAPABILITY_XATTR, capability.encode("utf-8", "surrogateescape"))
    if not member.isdir():
        os.utime(path, (member.mtime, member.mtime))


def _chown(path: str | int, uid: int, gid: int) -> None:
    if isinstance(path, str):
        os.chown(path, uid, gid, follow_symlinks=False)
    elif uid or gid:  # a new file is root's already
        os.fchown(path, uid, gid)


def _finish(layer: _Layer) -> None:
    """Say what is gone from the layers below, and set the times of directories."""
    for path in layer.removed:
        parent = os.path.dirname(path)
        os.makedirs(parent, 0o755, exist_ok=True)
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
            continue
        if stat.S_ISDIR(status.st_mode):  # removed, and made anew in the same layer
            layer.opaque.append(path)
    for path in layer.opaque:
        os.makedirs(path, 0o755, exist_ok=True)
        os.setxattr(path, _OPAQUE_XATTR, b"y", follow_symlinks=False)
    for path in sorted(layer.times, reverse=True):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a later entry replaced it
            os.utime(path, (layer.times[path], layer.times[path]), follow_symlinks=False)

"""Work of the file agent on whole trees, done in slices. Runs inside the sandbox: stdlib only, all imports here.

The agent has one thread, and a sandbox may hold a directory of a million names. So listing, removing and copying are
generators: each step yields an entry for the answer, or None, and `Jobs` runs them for a few milliseconds a call.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

from managed_e2b.local.runtime.agent_entries import DIR_FLAGS, OPEN_FLAGS, Describer, is_gone, weight

Job = Generator[Any, None, Any]

SLICE = 0.01  # seconds of work in one call
ITEMS = 256  # items in one answer
ANSWER = 1 << 20  # bytes of JSON after which an answer takes no further item; a frame may have many more
JOBS = 64  # at a time; a caller that never comes back must not make the agent grow
DEEPEST = 200  # directories held open at a time
COPY_STEP = 1 << 20  # bytes


class Jobs:
    """Work in progress. Every answer is `{"job", "items", "weight", "result"}`: `job` is None when the work is done,
    and `weight` is about how many bytes the items take."""

    def __init__(self) -> None:
        self._open: dict[int, Job] = {}
        self._ids = count(1)

    def start(self, job: Job) -> dict[str, Any]:
        """Begin. An error of the work is raised by the call in which it happens."""
        while len(self._open) >= JOBS:
            self.drop(next(iter(self._open)))
        number = next(self._ids)
        self._open[number] = job
        return self.advance(number)

    def advance(self, number: int) -> dict[str, Any]:
        """Go on with a job. OSError(ESTALE) when it was dropped."""
        job = self._open.get(number)
        if job is None:
            raise OSError(errno.ESTALE, "too much going on in this sandbox's files: the work was dropped")
        items: list[Any] = []
        total = 0
        deadline = time.monotonic() + SLICE
        try:
            while len(items) < ITEMS and total < ANSWER and time.monotonic() < deadline:
                item = next(job)
                if item is not None:
                    items.append(item)
                    total += weight(item)
        except StopIteration as end:
            del self._open[number]
            return {"job": None, "items": items, "weight": total, "result": end.value}
        except RecursionError:
            del self._open[number]
            raise OSError(errno.ENAMETOOLONG, "the directories are nested too deeply") from None
        except BaseException:
            del self._open[number]
            raise
        return {"job": number, "items": items, "weight": total, "result": None}

    def drop(self, number: int) -> None:
        """Forget a job, done or not."""
        job = self._open.pop(number, None)
        if job is not None:
            job.close()


def walk(describe: Describer, root: bytes, shown: bytes, depth: int) -> Job:
    """The entries below `root`, told as below `shown`: parents before children, by name, no link followed."""

    def names(path: bytes) -> Iterator[bytes]:
        fd = os.open(path, DIR_FLAGS)
        try:
            return iter(sorted(os.fsencode(name) for name in os.listdir(fd)))
        finally:
            os.close(fd)

    levels = [(root, shown, names(root))]
    while levels:
        path, told, pending = levels[-1]
        name = next(pending, None)
        if name is None:
            levels.pop()
            continue
        child = os.path.join(path, name)
        try:
            entry = describe.entry(child, os.path.join(told, name))
        except OSError as error:
            if not is_gone(error):
                raise
            yield None
            continue
        yield entry
        if entry["directory"] and len(levels) < depth:
            # One that cannot be read, or went away, is told as an entry and has no children to tell.
            with suppress(OSError):
                levels.append((child, os.path.join(told, name), names(child)))


def remove(path: bytes) -> Job:
    """`rm -rf`: what is missing is removed already, and no link is followed."""
    if os.path.normpath(path) == b"/":
        raise OSError(errno.EBUSY, "the root directory cannot be removed")
    try:
        os.unlink(path)
        return
    except (FileNotFoundError, NotADirectoryError):
        return
    except IsADirectoryError:
        yield None
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from _empty(path)
        os.rmdir(path)


def _empty(top: bytes) -> Job:
    """Remove all that is in a directory, with a bounded number of descriptors however deep it goes.

    Each level is held open, so a directory that is moved away meanwhile takes its own content with it and nothing else
    is touched. What lies deeper than that is first moved up to the top.
    """
    levels: list[tuple[int, list[bytes]]] = []
    raised = count()
    try:
        levels.append((os.open(top, DIR_FLAGS), []))
        yield from _unlink_files(*levels[-1])
        while levels:
            fd, directories = levels[-1]
            if not directories:
                if len(levels) == 1:
                    return
                os.close(levels.pop()[0])
                continue
            name = directories[-1]
            try:
                os.rmdir(name, dir_fd=fd)
                directories.pop()
            except FileNotFoundError:
                directories.pop()
            except NotADirectoryError:
                os.unlink(name, dir_fd=fd)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                if len(levels) >= DEEPEST:
                    directories.pop()
                    shallow = b".removing-%d-%d" % (os.getpid(), next(raised))
                    os.rename(name, shallow, src_dir_fd=fd, dst_dir_fd=levels[0][0])
                    levels[0][1].append(shallow)
                    continue
                with suppress(FileNotFoundError, NotADirectoryError):  # swapped: the next rmdir sees it
                    levels.append((os.open(name, DIR_FLAGS, dir_fd=fd), []))
                    yield from _unlink_files(*levels[-1])
            yield None
    finally:
        for fd, _ in levels:
            os.close(fd)


def _unlink_files(fd: int, directories: list[bytes]) -> Job:
    """Remove all but the directories of one directory, and list those."""
    for text in os.listdir(fd):
        name = os.fsencode(text)
        try:
            os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            directories.append(name)
        yield None


def move_across(source: bytes, destination: bytes) -> Job:
    """Move between two filesystems: copy beside the destination, put it in place at once, remove the source.

    Owners, modes, times and user xattrs go along; hard links become files of their own. The source stays when the copy
    fails, and no half of a copy does.
    """
    copy = b"%s/.moving-%d-%d" % (os.path.dirname(destination), os.getpid(), time.monotonic_ns())
    try:
        yield from _copy(source, copy)
        os.rename(copy, destination)
    except BaseException:
        for _ in remove(copy):
            pass
        raise
    yield from remove(source)


def _copy(source: bytes, destination: bytes) -> Job:
    status = os.lstat(source)
    if stat.S_ISDIR(status.st_mode):
        os.mkdir(destination, 0o700)
        for name in os.listdir(source):
            yield from _copy(os.path.join(source, name), os.path.join(destination, name))
    elif stat.S_ISREG(status.st_mode):
        yield from _copy_content(source, destination)
    elif stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), destination)
    elif stat.S_ISFIFO(status.st_mode):
        os.mkfifo(destination, 0o600)
    else:
        raise OSError(errno.EXDEV, "a socket or device cannot be moved to another filesystem")
    _copy_attributes(source, destination, status)
    yield None


def _copy_content(source: bytes, destination: bytes) -> Job:
    reader = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | OPEN_FLAGS)
    try:
        writer = os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600)
        try:
            while os.sendfile(writer, reader, None, COPY_STEP):
                yield None
        finally:
            os.close(writer)
    finally:
        os.close(reader)


def _copy_attributes(source: bytes, destination: bytes, status: os.stat_result) -> None:
    os.chown(destination, status.st_uid, status.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        with suppress(OSError):  # a filesystem without xattrs cannot have any to lose, or has no place for them
            for name in os.listxattr(source):
                if name.startswith("user."):
                    os.setxattr(destination, name, os.getxattr(source, name))
        os.chmod(destination, stat.S_IMODE(status.st_mode))
    os.utime(destination, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)

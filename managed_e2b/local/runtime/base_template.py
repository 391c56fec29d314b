"""Template `base`: a root made on the spot, over which the host's own /usr is laid read-only. No download.

Two layers are built: the root (a generated /etc, the homes, what programs expect of a system) and what lies over /usr
(stand-ins, and directories that belong to the sandbox's root, so that things can be installed). Only what is named
here is taken from the host, and only what everybody may read: the build runs as the sandboxes' root, who is nobody on
the host. Both are kept for the next server, under a name that says what they were made of. What belongs to `user` is a
third, small layer, made for each server: so all that is kept belongs to one id, and can be removed by it.

Standard library only; runs in a fork of the spawner.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from typing import Any

from managed_e2b.local.runtime import standins

_USER_ID = 1000
_DIRECTORIES = (
    "dev", "etc", "etc/pam.d", "etc/profile.d", "home", "media", "mnt", "opt", "proc", "root", "run", "run/lock",
    "srv", "sys", "tmp", "usr", "var", "var/cache", "var/lib", "var/local", "var/log", "var/mail", "var/opt",
    "var/spool", "var/tmp",
)  # fmt: skip
_MODES = {"tmp": 0o1777, "var/tmp": 0o1777, "run/lock": 0o1777, "root": 0o700}
_LINKS = {"etc/mtab": "/proc/self/mounts", "var/run": "/run", "var/lock": "/run/lock"}
_TOP_LINKS = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
# Files and directories of the host's /etc that are public and say nothing of who uses the host.
_FROM_ETC = (
    "adduser.conf", "alternatives", "ca-certificates.conf", "debian_version", "fonts", "gai.conf", "host.conf",
    "inputrc", "java-11-openjdk", "java-17-openjdk", "java-21-openjdk", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
    "locale.alias", "locale.conf", "localtime", "login.defs", "lsb-release", "magic", "magic.mime", "mime.types",
    "networks", "os-release", "perl", "pki/ca-trust/extracted", "pki/tls/certs", "protocols", "python3",
    "python3.11", "python3.12", "python3.13", "redhat-release", "rpc", "services", "skel", "ssl/certs",
    "ssl/openssl.cnf", "terminfo", "timezone", "vim", "xattr.conf",
)  # fmt: skip
_SKELETON_DEPTH = 3  # below /usr; deeper below /usr/local and where Python's packages lie
_DEEPER = ("local", "lib/python3")


def provide(kept: str, scratch: str, home: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Make the layers, those below `kept` only where they are not there yet.

    Returns the `name` below `kept` whose `root` and `usr` they are, and what this host could not give (`missing`).
    `scratch` and `home`, the third layer, are directories that do not exist yet, on the filesystem of `kept`. `facts`:
    `one_id` (there is no id for `user`), `python` (a directory laid at /opt/python, or None), `made_by` (whatever else
    the layers depend on).
    """
    one_id, python = bool(facts["one_id"]), facts["python"]
    name = _name(facts)
    if not os.path.isdir(f"{kept}/{name}"):
        os.mkdir(scratch, 0o755)
        _build_root(f"{scratch}/root", one_id)
        _build_usr(f"{scratch}/usr", one_id, python)
        try:
            os.rename(scratch, f"{kept}/{name}")  # whole, or not there
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another server was quicker
                raise
    _build_home(home, one_id)
    return {"name": name, "missing": _missing(python)}


def _name(facts: dict[str, Any]) -> str:
    """By what the build would take from the host now, as far as can be told without reading files."""
    text = hashlib.sha256(repr(sorted(facts.items())).encode())
    sources = [f"/etc/{name}" for name in _FROM_ETC] + [f"/{name}" for name in _TOP_LINKS]
    for line in (*_traits(sources, deep=True), *_traits(filter(None, [_setpriv(), "/usr/bin/python"]), deep=False)):
        text.update(os.fsencode(line))
    for below in _skeleton("/usr", 1):
        text.update(os.fsencode(f"{below}\n"))
    return text.hexdigest()[:32]


def _traits(paths: Iterable[str], *, deep: bool) -> Iterator[str]:
    for path in paths:
        try:
            status = os.lstat(path)
        except (FileNotFoundError, PermissionError):
            continue
        target = os.readlink(path) if stat.S_ISLNK(status.st_mode) else ""
        kind = stat.S_ISDIR(status.st_mode)
        times = () if kind else (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        yield f"{path} {status.st_mode} {times} {target}\n"
        if deep and kind and path.startswith("/etc/") and status.st_mode & 0o005 == 0o005:
            yield from _traits((f"{path}/{name}" for name in sorted(os.listdir(path))), deep=True)


def _build_root(root: str, one_id: bool) -> None:
    os.mkdir(root, 0o755)
    for name in _DIRECTORIES:
        os.mkdir(f"{root}/{name}", 0o755)
    for name, mode in _MODES.items():
        os.chmod(f"{root}/{name}", mode)
    for name, target in _LINKS.items():
        os.symlink(target, f"{root}/{name}")
    for name in _TOP_LINKS:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{root}/{name}", 0o755)  # a host without merged /usr: bound there (`bwrap.arguments`)
    for name in _FROM_ETC:
        _copy_public(f"/etc/{name}", f"{root}/etc/{name}")
    for name, text in standins.FILES.items():
        if not name.startswith("home/"):
            _write(f"{root}/{name}", text)
    _write(f"{root}/etc/passwd", standins.passwd(one_id))
    _write(f"{root}/etc/group", standins.group(one_id))


def _build_home(layer: str, one_id: bool) -> None:
    for directory in (layer, f"{layer}/home", f"{layer}/home/user"):
        os.mkdir(directory, 0o755)
    for name, text in standins.FILES.items():
        if name.startswith("home/"):
            _write(f"{layer}/{name}", text)
    if not one_id:
        for path in (f"{layer}/home/user", *_below(f"{layer}/home/user")):
            os.chown(path, _USER_ID, _USER_ID, follow_symlinks=False)


def _build_usr(usr: str, one_id: bool, python: str | None) -> None:
    os.mkdir(usr, 0o755)
    for below in _skeleton("/usr", 1):
        os.mkdir(f"{usr}/{below}", 0o755)
    for name in ("local/bin", "local/lib/me2b"):
        os.makedirs(f"{usr}/{name}", 0o755, exist_ok=True)
    setpriv = _setpriv()
    if setpriv:
        copy = f"{usr}{standins.SETPRIV_ROOT.removeprefix('/usr')}"
        shutil.copyfile(setpriv, copy)
        os.chmod(copy, 0o4755)
        _write(f"{usr}/local/bin/sudo", standins.sudo(one_id), 0o755)
    if _host_python():
        if not os.path.exists("/usr/bin/python"):
            os.symlink("/usr/bin/python3", f"{usr}/local/bin/python")
    elif python:
        for name in ("python", "python3"):
            os.symlink("/opt/python/bin/python3", f"{usr}/local/bin/{name}")


def _missing(python: str | None) -> list[str]:
    missing = []
    if not _setpriv():
        missing.append("sudo: this host has no setpriv (package util-linux)")
    if not _host_python() and not python:
        missing.append("python: this host has no /usr/bin/python3, nor another that everybody may read")
    return missing


def _setpriv() -> str | None:
    return shutil.which("setpriv", path="/usr/bin:/usr/sbin:/bin:/sbin")


def _host_python() -> bool:
    return os.access("/usr/bin/python3", os.X_OK)


def _skeleton(source: str, depth: int) -> Iterator[str]:
    """Directories below /usr as the host has them; owned by the sandbox's root, something can be added to them."""
    try:
        entries = sorted(os.scandir(source), key=lambda entry: entry.name)
    except PermissionError:
        return
    for entry in entries:
        below = entry.path.removeprefix("/usr/")
        if not entry.is_dir(follow_symlinks=False) or not _readable(entry):
            continue
        yield below
        if depth < _SKELETON_DEPTH or (below.startswith(_DEEPER) and depth < _SKELETON_DEPTH + 2):
            yield from _skeleton(entry.path, depth + 1)


def _readable(entry: os.DirEntry[str]) -> bool:
    return entry.stat(follow_symlinks=False).st_mode & 0o005 == 0o005


def _copy_public(source: str, target: str) -> None:
    """Copy what everybody may read. Links stay links; what cannot be read is left out."""
    try:
        status = os.lstat(source)
    except (FileNotFoundError, PermissionError):
        return
    os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISDIR(status.st_mode) and status.st_mode & 0o005 == 0o005:
        os.mkdir(target, 0o755)
        for name in os.listdir(source):
            _copy_public(f"{source}/{name}", f"{target}/{name}")
    elif stat.S_ISREG(status.st_mode) and status.st_mode & 0o004:
        shutil.copyfile(source, target)
        os.chmod(target, 0o755 if status.st_mode & 0o001 else 0o644)


def _below(top: str) -> list[str]:
    return [os.path.join(parent, name) for parent, folders, files in os.walk(top) for name in (*folders, *files)]


def _write(path: str, text: str, mode: int = 0o644) -> None:
    if os.path.islink(path):
        os.unlink(path)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)

"""The few Linux calls that Python 3.11 does not offer, as functions that raise OSError.

Standard library only: the spawner and everything it forks import this before they enter a sandbox.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import termios

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

LAST_DESCRIPTOR = 2**32 - 1
# These have the same number on every architecture. os.closerange may be a loop over all numbers.
_OPEN_TREE = 428
_MOVE_MOUNT = 429
_CLOSE_RANGE = 436
_OPENAT2 = 437

_AT_FDCWD = -100
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_MOVE_MOUNT_T_EMPTY_PATH = 0x40
_RESOLVE_NO_MAGICLINKS = 0x2
_RESOLVE_NO_SYMLINKS = 0x4
_RESOLVE_BENEATH = 0x8

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_SECUREBITS = 28
_PR_SET_CHILD_SUBREAPER = 36
_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219}
_KEYCTL_JOIN_SESSION_KEYRING = 1
_KEYCTL_REVOKE = 3
_SESSION_KEYRING = -3
_SECCOMP_MODE_FILTER = 2
_SECBIT_NO_SETUID_FIXUP = 1 << 2
_TIOCGPTN = 0x80045430
_TIOCSPTLCK = 0x40045431

# What root inside a sandbox may do, by capability number: what containers usually get, and nothing that changes mounts,
# namespaces or the kernel, or that reaches into processes with more rights (the sandbox's first process).
ROOT_CAPABILITIES = frozenset(
    {
        0,  # chown
        1,  # dac_override
        3,  # fowner
        4,  # fsetid
        5,  # kill
        6,  # setgid
        7,  # setuid
        8,  # setpcap
        10,  # net_bind_service
        13,  # net_raw
        15,  # ipc_owner
        18,  # sys_chroot
        27,  # mknod
        28,  # lease
        29,  # audit_write
        31,  # setfcap
    }
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def setns(fd: int, flags: int) -> None:
    """Enter the namespaces `flags` of the process behind a pidfd, or the one namespace behind `fd`."""
    _check(_libc.setns(fd, flags), "setns")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def close_range(first: int, last: int) -> None:
    """Close all descriptors from `first` to `last`."""
    _check(_libc.syscall(_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(last), 0), "close_range")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    _check(
        _libc.mount(
            os.fsencode(source), os.fsencode(target), kind.encode() if kind else None, flags, os.fsencode(data)
        ),
        f"mount {target}",
    )


def clone_mount(path: str) -> int:
    """A copy of the mount at `path`, or of a directory of it, which is mounted nowhere yet: a descriptor."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    fd: int = _libc.syscall(_OPEN_TREE, ctypes.c_int(_AT_FDCWD), ctypes.c_char_p(os.fsencode(path)), flags)
    _check(fd, os.path.basename(path))
    return fd


def move_mount(tree: int, directory: int) -> None:
    """Mount what `clone_mount` gave on an open directory."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
    empty = ctypes.c_char_p(b"")
    _check(_libc.syscall(_MOVE_MOUNT, ctypes.c_int(tree), empty, ctypes.c_int(directory), empty, flags), "move_mount")


def open_directory_beneath(top: int, path: str) -> int:
    """Open a directory below an open one, with no link on the way (ELOOP): a descriptor of its path alone."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    how = struct.pack("QQQ", flags, 0, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)
    name = ctypes.c_char_p(os.fsencode(path))
    fd: int = _libc.syscall(_OPENAT2, ctypes.c_int(top), name, ctypes.c_char_p(how), ctypes.c_size_t(len(how)))
    _check(fd, path)
    return fd


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def set_dumpable(yes: bool) -> None:
    """Not dumpable: no process of a sandbox may trace this one or follow its /proc/PID/{exe,mem,fd,root} links.

    Inherited by fork, reset by execve, and stronger than root inside a user namespace below ours.
    """
    _prctl(_PR_SET_DUMPABLE, int(yes))


def die_with_parent(signal_number: int) -> None:
    """Get a signal when the parent's thread ends. Lost when ids change, so call it after that."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def keep_capabilities() -> None:
    """A change of ids takes no capabilities any more, until a new user namespace is entered. PermissionError."""
    _prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP)


def become_subreaper() -> None:
    """Orphaned descendants become our children, those in pid namespaces that we entered by setns included."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forget_session_keyring() -> None:
    """Leave the inherited session keyring for one of no use: whoever has a keyring may read its keys."""
    number = _KEYCTL.get(os.uname().machine)
    if number is not None and _libc.syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None) >= 0:
        _check(_libc.syscall(number, _KEYCTL_REVOKE, _SESSION_KEYRING), "keyctl")


def install_filter(program: int) -> None:
    """A seccomp filter, from the address of its struct sock_fprog."""
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "seccomp")


def limit_capabilities() -> None:
    """Drop everything but ROOT_CAPABILITIES from the bounding set: no later execve, setuid or not, gets it back."""
    for number in range(64):
        if number in ROOT_CAPABILITIES:
            continue
        if _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            return  # EINVAL: past the last capability of this kernel


def sync_filesystem(fd: int) -> None:
    """Have all that is written to the filesystem of a file on its disk."""
    _check(_libc.syncfs(fd), "syncfs")


def open_pty(cols: int, rows: int) -> tuple[int, str]:
    """A new terminal of the devpts that is mounted here: its master (close-on-exec), and the path of its slave."""
    master = os.open("/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
    (number,) = struct.unpack("i", fcntl.ioctl(master, _TIOCGPTN, struct.pack("i", 0)))
    resize_pty(master, cols, rows)
    return master, f"/dev/pts/{number}"


def resize_pty(fd: int, cols: int, rows: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows & 0xFFFF, cols & 0xFFFF, 0, 0))

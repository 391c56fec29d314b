"""A filter that takes from commands what no namespace holds apart: the kernel's keys, and some kinds of sockets.

For an ordinary user, root inside a sandbox is that user on the host, and could read the user's keys by their numbers
(Kerberos tickets, for one). And a network namespace does not confine every kind of socket: AF_VSOCK leads out of it, to
the host's own listeners and, where the host is a virtual machine, to its hypervisor. So only those kinds are to be had
that it does confine; and no io_uring, which would make the others without a system call. Setuid programs go on working,
because no_new_privs is not needed by whom may install a filter.

Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import struct
import sys
from collections.abc import Sequence

from managed_e2b.local.runtime import linux

_LOAD = 0x20  # a 32-bit word of struct seccomp_data
_AND = 0x54
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_FIRST_ARGUMENT = 16 if sys.byteorder == "little" else 20  # its lower half: the kernel heeds no more of a domain
_ALLOW = 0x7FFF0000
_DENY = 0x00050000 | errno.EPERM
_NO_SUCH_CALL = 0x00050000 | errno.ENOSYS
_NO_SUCH_FAMILY = 0x00050000 | errno.EAFNOSUPPORT
_X32 = 0x40000000  # bit of the x32 numbers on x86-64

# AUDIT_ARCH_… → add_key, request_key, keyctl
_KEY_CALLS = {
    0xC000003E: (248, 249, 250),  # x86-64
    0x40000003: (286, 287, 288),  # i386
    0xC00000B7: (217, 218, 219),  # aarch64
    0x40000028: (309, 310, 311),  # arm
    0xC00000F3: (217, 218, 219),  # riscv64
}

# AUDIT_ARCH_… → socket, socketpair
_SOCKET_CALLS = {
    0xC000003E: (41, 53),
    0x40000003: (359, 360),
    0xC00000B7: (198, 199),
    0x40000028: (281, 288),
    0xC00000F3: (198, 199),
}
_FAMILIES = (0, 1, 2, 10, 16, 17)  # unspecified, unix, inet, inet6, netlink, packet
_IO_URING_SETUP = 425  # the same on every architecture
# The old way of 32-bit x86: its arguments lie in memory, where a filter cannot look.
_I386, _SOCKETCALL, _SYS_SOCKET, _SYS_SOCKETPAIR = 0x40000003, 102, 1, 8


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _when(number: int, then: list[bytes]) -> list[bytes]:
    """`then`, which returns in any case, for this system call; its number is loaded."""
    return [_instruction(_JUMP_IF_EQUAL, number, 0, len(then)), *then]


def _only(values: Sequence[int]) -> list[bytes]:
    """Allow the call when its first argument is one of these."""
    checks = [_instruction(_JUMP_IF_EQUAL, value, len(values) - place) for place, value in enumerate(values)]
    return [
        _instruction(_LOAD, _FIRST_ARGUMENT),
        *checks,
        _instruction(_RETURN, _NO_SUCH_FAMILY),
        _instruction(_RETURN, _ALLOW),
    ]


def _none_of(values: Sequence[int]) -> list[bytes]:
    """Allow the call unless its first argument is one of these."""
    checks = [_instruction(_JUMP_IF_EQUAL, value, len(values) - place) for place, value in enumerate(values)]
    return [
        _instruction(_LOAD, _FIRST_ARGUMENT),
        *checks,
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _NO_SUCH_FAMILY),
    ]


def _program() -> bytes:
    parts = [_instruction(_LOAD, _ARCHITECTURE)]
    for architecture, numbers in _KEY_CALLS.items():
        block = [_instruction(_LOAD, _NUMBER), _instruction(_AND, 0xFFFFFFFF & ~_X32)]
        for number in numbers:
            block += [_instruction(_JUMP_IF_EQUAL, number, 0, 1), _instruction(_RETURN, _DENY)]
        block += _when(_IO_URING_SETUP, [_instruction(_RETURN, _NO_SUCH_CALL)])
        for number in _SOCKET_CALLS[architecture]:
            block += _when(number, _only(_FAMILIES))
        if architecture == _I386:
            block += _when(_SOCKETCALL, _none_of((_SYS_SOCKET, _SYS_SOCKETPAIR)))
        block.append(_instruction(_RETURN, _ALLOW))
        parts += [_instruction(_JUMP_IF_EQUAL, architecture, 0, len(block)), *block]
    return b"".join([*parts, _instruction(_RETURN, _ALLOW)])


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


_BYTES = _program()
_FILTER = _Filter(len(_BYTES) // 8, _BYTES)


def install() -> None:
    """For this process and its descendants, for good. Needs CAP_SYS_ADMIN in its user namespace. Raises OSError."""
    linux.install_filter(ctypes.addressof(_FILTER))

"""A filter that takes the kernel's keys away from commands: they are the one thing that no namespace holds apart.

For an ordinary user, root inside a sandbox is that user on the host, and could read the user's keys by their numbers
(Kerberos tickets, for one). Setuid programs go on working, because no_new_privs is not needed by whom may install it.

Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from managed_e2b.local.runtime import linux

_LOAD = 0x20  # a 32-bit word of struct seccomp_data
_AND = 0x54
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_ALLOW = 0x7FFF0000
_DENY = 0x00050000 | errno.EPERM
_X32 = 0x40000000  # bit of the x32 numbers on x86-64

# AUDIT_ARCH_… → add_key, request_key, keyctl
_KEY_CALLS = {
    0xC000003E: (248, 249, 250),  # x86-64
    0x40000003: (286, 287, 288),  # i386
    0xC00000B7: (217, 218, 219),  # aarch64
    0x40000028: (309, 310, 311),  # arm
    0xC00000F3: (217, 218, 219),  # riscv64
}


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _program() -> bytes:
    parts = [_instruction(_LOAD, _ARCHITECTURE)]
    for architecture, numbers in _KEY_CALLS.items():
        block = [_instruction(_LOAD, _NUMBER), _instruction(_AND, 0xFFFFFFFF & ~_X32)]
        for number in numbers:
            block += [_instruction(_JUMP_IF_EQUAL, number, 0, 1), _instruction(_RETURN, _DENY)]
        block.append(_instruction(_RETURN, _ALLOW))
        parts += [_instruction(_JUMP_IF_EQUAL, architecture, 0, len(block)), *block]
    return b"".join([*parts, _instruction(_RETURN, _ALLOW)])


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


_BYTES = _program()
_FILTER = _Filter(len(_BYTES) // 8, _BYTES)


def forbid_keys() -> None:
    """For this process and its descendants, for good. Needs CAP_SYS_ADMIN in its user namespace. Raises OSError."""
    linux.install_filter(ctypes.addressof(_FILTER))

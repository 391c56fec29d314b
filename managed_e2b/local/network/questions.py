"""What a DNS message asks, as far as a policy wants to know. Pure."""

from __future__ import annotations

import struct

_HEADER = struct.Struct(">HHHHHH")
_QUESTION = struct.Struct(">HH")
_RESPONSE, _OPCODE = 0x8000, 0x7800
_LONGEST_LABEL = 63
_TRANSFERS = frozenset({251, 252})  # IXFR, AXFR


def name_asked(message: bytes) -> str | None:
    """The name that a plain question is about, in lower case; `.` for the root.

    None for everything else: updates, notifications, transfers of whole zones, several questions, broken ones. A server
    may do for the host what it does for nobody else.
    """
    if len(message) < _HEADER.size:
        return None
    _, flags, questions, answers, authorities, _ = _HEADER.unpack_from(message)
    if flags & (_RESPONSE | _OPCODE) or (questions, answers, authorities) != (1, 0, 0):
        return None
    labels, at = [], _HEADER.size
    while at < len(message) and (length := message[at]):
        label = message[at + 1 : at + 1 + length]
        if length > _LONGEST_LABEL or len(label) < length or b"." in label:
            return None  # a compressed name, which a question has no use for; or one that would read as another
        labels.append(label.decode("latin-1").lower())
        at += 1 + length
    if len(message) < at + 1 + _QUESTION.size or _QUESTION.unpack_from(message, at + 1)[0] in _TRANSFERS:
        return None
    return ".".join(labels) or "."

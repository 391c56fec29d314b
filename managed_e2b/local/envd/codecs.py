"""How RPC messages are read: connectrpc's own codecs, but a message that makes no sense is the client's fault.

Alone they let the decoder's error out as `unknown` (500) with a traceback in the server's log, and JSON nested tens of
thousands deep overflows the stack of protobuf's native parser, which ends the whole process.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from connectrpc.code import Code
from connectrpc.codec import Codec, proto_binary_codec, proto_json_codec
from connectrpc.errors import ConnectError

T = TypeVar("T")

# envd's messages have lists in lists nowhere, so more than this many brackets are text, or an attack.
LISTS_UNCHECKED = 500


class CheckedCodec(Codec[Any, Any]):
    """Raises ConnectError(INVALID_ARGUMENT) from `decode` for whatever cannot be decoded."""

    def __init__(self, codec: Codec[Any, Any], *, is_json: bool) -> None:
        self._codec = codec
        self._is_json = is_json

    def name(self) -> str:
        return self._codec.name()

    def encode(self, message: Any) -> bytes:
        return self._codec.encode(message)

    def decode(self, data: bytes | bytearray, message_class: type[T]) -> T:
        try:
            if self._is_json and data.count(b"[") > LISTS_UNCHECKED:
                json.loads(data)  # raises RecursionError where the native parser would crash
            message: T = self._codec.decode(data, message_class)
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise ConnectError(Code.INVALID_ARGUMENT, f"cannot read the message: {error}") from error
        return message


CODECS: list[Codec[Any, Any]] = [
    CheckedCodec(proto_binary_codec(), is_json=False),
    CheckedCodec(proto_json_codec(), is_json=True),
]

"""From what the file agent tells of a file to envd's messages."""

from __future__ import annotations

from typing import Any

from e2b.envd.filesystem import filesystem_pb as pb
from protobuf.wkt import Timestamp

from managed_e2b.local.envd.agent import printable

_TYPES = {"file": pb.FileType.FILE, "directory": pb.FileType.DIRECTORY}
_NS = 1_000_000_000


def entry_info(entry: dict[str, Any]) -> pb.EntryInfo:
    """An entry as envd 0.6 tells it: of a link, `type` and `mode` are the target's, and `symlink_target` marks it.

    `is_symlink` stays unset although the message has it: it belongs to later versions than the one we report, and SDKs
    that see it say `FileType.SYMLINK` where E2B's own tests want the type of the target.
    """
    seconds, nanos = divmod(entry["mtime_ns"], _NS)
    info = pb.EntryInfo(
        name=printable(entry["name"]),
        type=_TYPES.get(entry["type"], pb.FileType.UNSPECIFIED),
        path=printable(entry["path"]),
        size=entry["size"],
        mode=entry["mode"],
        permissions=entry["permissions"],
        owner=printable(entry["owner"]),
        group=printable(entry["group"]),
        modified_time=Timestamp(seconds=seconds, nanos=nanos),
        metadata=entry["metadata"],
    )
    if entry["target"] is not None:
        info.symlink_target = printable(entry["target"])
    return info

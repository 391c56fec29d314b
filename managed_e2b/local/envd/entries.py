"""From what the file agent tells of a file to envd's messages."""

from __future__ import annotations

from typing import Any

from e2b.envd.filesystem import filesystem_pb as pb
from protobuf.wkt import Timestamp

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


def event_weight(event: pb.FilesystemEvent) -> int:
    """About how many bytes of memory an event takes."""
    entry = event.entry
    size = 500 + len(event.name)
    if entry is not None:
        size += 1000 + len(entry.path) + len(entry.symlink_target)
        size += sum(len(key) + len(value) for key, value in entry.metadata.items())
    return size


def printable(text: str) -> str:
    """A name as messages can carry it: bytes that are not UTF-8 become U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

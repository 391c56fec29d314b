"""Container images of this host's own programs, and a real registry on the loopback address that serves them."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import requests
from dxf import DXF

PROGRAMS = (
    "bash", "cat", "chgrp", "chmod", "chown", "cp", "cut", "dirname", "env", "find", "grep", "gzip", "id", "ln", "ls",
    "mkdir", "mv", "printf", "pwd", "readlink", "rm", "sed", "setpriv", "sh", "sleep", "stat", "tar", "test", "touch",
    "true", "false", "tr", "useradd", "whoami",
)  # fmt: skip
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"


@dataclass(frozen=True)
class Member:
    """One entry of a layer; `kind` as tarfile's types."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0


def directory(name: str, mode: int = 0o755) -> Member:
    return Member(name, kind=tarfile.DIRTYPE, mode=mode)


def link(name: str, target: str) -> Member:
    return Member(name, kind=tarfile.SYMTYPE, link=target)


def layer(members: Iterable[Member], *, packed: bool = True) -> bytes:
    """A layer's archive; the same members, the same bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.size, info.type, info.linkname = len(member.data), member.kind, member.link
            info.mode, info.uid, info.gid = member.mode, member.uid, member.gid
            tar.addfile(info, io.BytesIO(member.data))
    return gzip.compress(out.getvalue(), mtime=0) if packed else out.getvalue()


def root_layer(programs: Sequence[str] = PROGRAMS) -> bytes:
    """A small system: programs of this host with the libraries that they need, as Debian lays them."""
    members: dict[str, Member] = {}
    for top in ("bin", "sbin", "lib", "lib64"):
        members[top] = link(top, f"usr/{top}")
        members[f"usr/{top}"] = directory(f"usr/{top}")
    members |= {name: directory(name) for name in ("etc", "tmp", "usr/local", "usr/local/bin")}
    members["etc/debian_version"] = Member("etc/debian_version", b"stand-in\n")
    for program in programs:
        found = shutil.which(program, path="/usr/bin:/usr/sbin:/bin:/sbin")
        assert found is not None, f"this host has no {program}"
        _add(members, f"usr/bin/{program}", found)
        for library in _libraries(found):
            folder = "usr/lib64" if library.startswith("/lib64") else "usr/lib"
            _add(members, f"{folder}/{os.path.basename(library)}", library)
    return layer(members.values())


def _add(members: dict[str, Member], name: str, source: str) -> None:
    members[name] = Member(name, Path(source).read_bytes(), mode=0o755)


def _libraries(program: str) -> list[str]:
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    words = [word for line in told.stdout.splitlines() for word in line.split() if word.startswith("/")]
    return [word for word in words if os.path.isfile(word)]


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


@dataclass(frozen=True)
class Image:
    """What is pushed: layers, the lowest first, and variables of its configuration."""

    layers: Sequence[bytes]
    env: Sequence[str] = ()
    config: dict[str, object] = field(default_factory=dict)

    def parts(self) -> tuple[bytes, dict[str, object]]:
        """Its configuration and its manifest."""
        config = json.dumps(
            {
                "architecture": architecture(),
                "os": "linux",
                "config": {"Env": list(self.env), **self.config},
                "rootfs": {"type": "layers", "diff_ids": [digest(gzip.decompress(data)) for data in self.layers]},
            }
        ).encode()
        manifest: dict[str, object] = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": digest(config), "size": len(config)},
            "layers": [{"mediaType": LAYER, "digest": digest(data), "size": len(data)} for data in self.layers],
        }
        return config, manifest


@dataclass(frozen=True)
class Registry:
    """docker-registry, as Debian ships it. `host` is `127.0.0.1:port`."""

    host: str
    user: str | None = None
    password: str | None = None
    authority: Path | None = None

    def client(self, repository: str) -> DXF:
        def authenticate(dxf: object, response: object) -> None:
            dxf.authenticate(self.user, self.password, response=response)  # type: ignore[attr-defined]

        secured = self.authority is not None
        verify = str(self.authority) if secured else True
        return DXF(self.host, repository, authenticate if secured else None, insecure=not secured, tlsverify=verify)

    def push(self, name: str, image: Image, tag: str = "latest") -> str:
        """The image's reference in this registry."""
        client = self.client(name)
        config, manifest = image.parts()
        for data in (*image.layers, config):
            client.push_blob(data=iter([data]), digest=digest(data))
        client.set_manifest(tag, json.dumps(manifest))
        return f"{self.host}/{name}:{tag}"


@contextlib.contextmanager
def serve(place: Path, extra: str = "") -> Iterator[str]:
    """A registry that keeps its images below `place`: `127.0.0.1:port`. `extra`: of its `http` section."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = place / "registry.yml"
    settings.write_text(
        "version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\n"
        f"storage: {{filesystem: {{rootdirectory: {place}/data}}}}\n"
        f"http:\n  addr: 127.0.0.1:{port}\n{extra}"
    )
    with open(place / "registry.log", "wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(settings)], stdout=log, stderr=log)
    try:
        _wait(process, port, place / "registry.log")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError("the registry did not start")


def available() -> bool:
    return shutil.which("docker-registry") is not None


def stand_in() -> Image:
    """In place of `ubuntu:22.04` and the like: a root and one more layer, which removes a file of the first."""
    top = layer([Member("etc/.wh.debian_version"), Member("etc/stand-in", b"yes\n"), directory("srv/data")])
    return Image([root_layer(), top], ["FROM_IMAGE=yes", "PATH=/opt/x/bin:/usr/bin:/bin"])


__all__ = ["Image", "Member", "Registry", "available", "layer", "link", "requests", "root_layer", "serve", "stand_in"]

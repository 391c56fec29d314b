"""Images from container registries: their description, and their layers as files. By `python-dxf`.

Everything that comes from a registry is checked against the digest by which it was asked for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import json
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from managed_e2b.local.builds import reference as references
from managed_e2b.local.builds.reference import Endpoint, Reference

if TYPE_CHECKING:
    from dxf import DXF

T = TypeVar("T")

MAX_DESCRIPTION = 4 * 1024 * 1024
"""Bytes of a manifest, and of an image's configuration."""
MAX_ARCHIVES = 16 * 1024**3
"""Bytes of the archives of all layers of an image."""
_TIMEOUT = 60.0  # seconds without a byte
_CHUNK = 1 << 20
_MANIFESTS = frozenset(
    {"application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"}
)
_INDEXES = frozenset(
    {"application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"}
)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


class PullError(Exception):
    """An image that cannot be had. The message is for whoever asked for it, and holds no secret."""


class Unreachable(PullError):
    """Nobody answers for the registry."""


@dataclass(frozen=True)
class Credentials:
    username: str
    password: str = field(repr=False)


@dataclass(frozen=True)
class Archive:
    """A layer as the registry has it. `size` in bytes."""

    digest: str
    size: int


@dataclass(frozen=True)
class RemoteImage:
    """`digest` is its configuration's; `archives` are the lowest first.

    The configuration names its layers too, but a registry may send others with it: only both tell what an image is.
    """

    digest: str
    env: Mapping[str, str]
    archives: tuple[Archive, ...]
    source: DXF = field(repr=False, compare=False)

    @property
    def layers(self) -> list[str]:
        """The digests of its archives."""
        return [archive.digest for archive in self.archives]


class Registries:
    """`mirrors`: registry → URL that is asked in its place. `directory`: where archives lie while they are unpacked."""

    def __init__(self, mirrors: Mapping[str, str], directory: Callable[[], Path]) -> None:
        self._mirrors = dict(mirrors)
        self._directory = directory

    async def describe(self, reference: Reference, credentials: Credentials | None) -> RemoteImage:
        """The image as the registry has it now, for this host's architecture. Raises PullError."""
        return await _in_thread(lambda stop: self._describe(reference, credentials))

    async def fetch(self, image: RemoteImage, archive: Archive) -> int:
        """A descriptor of a layer's archive, checked, at its beginning. Raises PullError, and OSError: a full disk."""
        return await _in_thread(lambda stop: self._fetch(image, archive, stop))

    def _describe(self, reference: Reference, credentials: Credentials | None) -> RemoteImage:
        where = references.endpoint(reference, self._mirrors)
        with _explained(reference, where):
            source = _client(where, reference.repository, None if where.mirror else credentials)
            manifest = _manifest(source, reference)
            config_digest = str(manifest["config"]["digest"])
            config = json.loads(_blob(source, config_digest, MAX_DESCRIPTION))
            archives = tuple(Archive(str(layer["digest"]), int(layer["size"])) for layer in manifest["layers"])
        size = sum(max(0, archive.size) for archive in archives)
        if size > MAX_ARCHIVES:
            raise PullError(f"{reference}: {size} bytes are too large for an image")
        lines = (config.get("config") or {}).get("Env") or []
        env = dict(line.split("=", 1) for line in lines if isinstance(line, str) and "=" in line)
        return RemoteImage(config_digest, env, archives, source)

    def _fetch(self, image: RemoteImage, archive: Archive, stop: threading.Event) -> int:
        with tempfile.TemporaryFile(dir=self._directory(), prefix="archive-") as file:
            with _explained(None, None):
                size = 0
                for chunk in _chunks(image.source, archive.digest):
                    size += len(chunk)
                    if stop.is_set():
                        raise PullError("the build was cancelled")
                    if size > archive.size:
                        raise PullError(f"layer {archive.digest} is larger than the registry said")
                    file.write(chunk)
            file.flush()
            return os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)


async def _in_thread(work: Callable[[threading.Event], T]) -> T:
    """Run blocking work; cancelled, it is told to stop, and nobody waits for that.

    In a thread of its own: a registry that does not answer must not hold up others, nor the end of the server.
    """
    stop = threading.Event()
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(work(stop))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="me2b-pull", daemon=True).start()
    running = asyncio.wrap_future(done)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        running.add_done_callback(_forget)
        raise


def _forget(done: asyncio.Future[Any]) -> None:
    if not done.cancelled() and done.exception() is None and isinstance(done.result(), int):
        os.close(done.result())


def _client(where: Endpoint, repository: str, credentials: Credentials | None) -> DXF:
    from dxf import DXF

    from managed_e2b.local.builds import transport

    def authenticate(client: Any, response: Any) -> None:
        if credentials is None:
            client.authenticate(response=response)
        else:
            client.authenticate(credentials.username, credentials.password, response=response)

    class Source(DXF):
        def __init__(self) -> None:
            super().__init__(where.host, repository, authenticate, insecure=where.insecure, timeout=_TIMEOUT)
            self._sessions = [transport.session(MAX_DESCRIPTION)]

    return Source()


def _manifest(source: DXF, reference: Reference) -> dict[str, Any]:
    """The manifest for this architecture, by way of an index or not."""
    manifest, kind = _ask(source, reference.manifest)
    if kind in _INDEXES:
        manifest, kind = _ask(source, _of_this_host(manifest, reference))
    if kind not in _MANIFESTS:
        raise PullError(f"{reference} is not a container image but {kind or 'something else'}")
    return manifest


def _ask(source: DXF, name: str) -> tuple[dict[str, Any], str]:
    _, response = source.get_manifest_and_response(name)
    content = response.content
    if len(content) > MAX_DESCRIPTION:
        raise PullError("the registry's description of the image is too large")
    if name.startswith("sha256:") and f"sha256:{hashlib.sha256(content).hexdigest()}" != name:
        raise PullError(f"the registry answered something else than {name}")
    value = json.loads(content)
    kind = value.get("mediaType") or response.headers.get("Content-Type", "").partition(";")[0]
    return value, str(kind)


def _of_this_host(index: Mapping[str, Any], reference: Reference) -> str:
    machine = platform.machine()
    wanted = _ARCHITECTURES.get(machine, machine)
    for entry in index["manifests"]:
        target = entry.get("platform") or {}
        if target.get("os") == "linux" and target.get("architecture") == wanted:
            return str(entry["digest"])
    raise PullError(f"{reference} is not there for linux/{wanted}")


def _blob(source: DXF, digest: str, most: int) -> bytes:
    data = bytearray()
    for chunk in _chunks(source, digest):
        data += chunk
        if len(data) > most:
            raise PullError("the image's configuration is too large")
    return bytes(data)


def _chunks(source: DXF, digest: str) -> Iterable[bytes]:
    """A blob; what is not as its digest says fails at the end."""
    return cast("Iterable[bytes]", source.pull_blob(digest, chunk_size=_CHUNK))


@contextmanager
def _explained(reference: Reference | None, where: Endpoint | None) -> Iterator[None]:
    """Failures of the library and of HTTP as PullError. Their own texts are left out where they may hold a secret."""
    import requests
    from dxf import exceptions as dxf

    from managed_e2b.local.builds import transport

    what = "the image" if reference is None else f"the image {reference}"
    host = "the registry" if where is None else where.host
    try:
        yield
    except transport.Astray as error:
        text = f"{host} sends who asks for {what} to this host or its network, where it is not itself: it is refused"
        raise PullError(text) from error
    except transport.TooLong as error:
        raise PullError("the registry's description of the image is too large") from error
    except dxf.DXFUnauthorizedError as error:
        raise PullError(f"access to {what} is denied: it is private or does not exist") from error
    except dxf.DXFAuthInsecureError as error:
        raise PullError(f"{host} asks for credentials over plain HTTP, which would tell them to everybody") from error
    except dxf.DXFDigestMismatchError as error:
        raise PullError(f"{what} arrived damaged: it does not have its digest") from error
    except requests.HTTPError as error:
        status = 0 if error.response is None else error.response.status_code
        if status == 404:
            raise PullError(f"{what} was not found at {host}") from error
        if status == 429:
            raise PullError(f"{host} allows no more pulls now: log in, or use a mirror (--registry-mirror)") from error
        raise PullError(f"{host} answered {status} when asked for {what}") from error
    except requests.RequestException as error:
        raise Unreachable(f"cannot reach {host} for {what} ({type(error).__name__})") from error
    except (dxf.DXFError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise PullError(f"{host} described {what} in a way that is not understood ({type(error).__name__})") from error

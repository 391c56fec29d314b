"""The local server: one runtime, one registry, one HTTP listener on the loopback address."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from managed_e2b.local import keys
from managed_e2b.local.api.app import control_plane
from managed_e2b.local.builds.service import Builds
from managed_e2b.local.builtin import add_builtin
from managed_e2b.local.clock import Clock, SystemClock
from managed_e2b.local.connections import BoundedProtocol, backlog
from managed_e2b.local.envd.signatures import signature_matches
from managed_e2b.local.gateway import Gateway
from managed_e2b.local.model import EnvdFactory
from managed_e2b.local.runtime.base import Runtime
from managed_e2b.local.sandboxes import SandboxRegistry
from managed_e2b.local.sizes import Sizes
from managed_e2b.local.templates import TemplateCatalog
from managed_e2b.local.volumes.catalog import VolumeCatalog

if TYPE_CHECKING:
    from managed_e2b.local.chaos.layer import ChaosLayer
    from managed_e2b.local.chaos.rules import Script
    from managed_e2b.local.tls import Tls

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
KEEP_ALIVE = 620
"""Seconds an idle connection is kept: longer than any client keeps it (300), so that no request meets a closing one."""
GRACE = 5
"""Seconds that requests under way get at the end."""


class LocalServer:
    """An E2B-compatible server of this process.

    `port` 0 takes a free one. `api_key` None: one is made. `data_dir` is where sandboxes keep their files while they
    live (None: the runtime's choice). `runtime` None: bubblewrap. `chaos`: the faults that are in force from the start;
    None: none ever, and nobody can ask for any. `tls_domain`: the sandboxes' domain, for which the server then answers
    https to whoever uses it as HTTPS proxy; None: plain HTTP only. `internet` False: no sandbox reaches anything
    outside, whatever it is made with. `registry_mirrors`: container registry → URL of what to pull from in its place.
    `cache_bytes`: of what builds of templates keep for later ones (None: the runtime's choice). `sizes`: what a sandbox
    gets whose template does not ask for anything else (None: `Sizes()`). `keep_volumes`: they stay in the data
    directory, for the next server that keeps them. Nothing is done before `start`.
    """

    def __init__(
        self,
        port: int = 0,
        api_key: str | None = None,
        data_dir: Path | None = None,
        runtime: Runtime | None = None,
        *,
        envd: EnvdFactory | None = None,
        clock: Clock | None = None,
        chaos: Script | None = None,
        tls_domain: str | None = None,
        internet: bool = True,
        registry_mirrors: Mapping[str, str] | None = None,
        cache_bytes: int | None = None,
        keep_volumes: bool = False,
        sizes: Sizes | None = None,
    ) -> None:
        self._sizes = sizes
        self._cache_bytes = cache_bytes
        self._keep_volumes = keep_volumes
        self._port = port
        self._data_dir = data_dir
        self._runtime = runtime
        self._envd = envd
        self._clock = clock or SystemClock()
        self._script = chaos
        self._tls_domain = tls_domain
        self._no_way_out = None if internet else "the server was started without it"
        self._http: _Http | None = None
        self._serving: asyncio.Task[None] | None = None
        self._registry: SandboxRegistry | None = None
        self._mirrors = dict(registry_mirrors or {})
        self._builds: Builds | None = None
        self._volumes: VolumeCatalog | None = None
        self._chaos: ChaosLayer | None = None
        self.api_key = api_key or keys.new_api_key()
        self.url = ""
        """`http://127.0.0.1:<port>`, once started."""
        self.tls: Tls | None = None
        """What its https clients need, once started with a `tls_domain`."""

    @property
    def registry(self) -> SandboxRegistry:
        """The sandboxes, once started."""
        if self._registry is None:
            raise RuntimeError("the server is not started")
        return self._registry

    async def start(self) -> None:
        """Listen, and make sandboxes possible.

        Raises OSError (the port, the authority's files), ValueError (the domain), RuntimeUnavailable (the host).
        """
        listener = _listen(self._port)
        try:
            if self._tls_domain is not None:
                from managed_e2b.local import tls

                self.tls = await asyncio.to_thread(tls.prepare, keys.tls_directory(), self._tls_domain)
            if self._runtime is None:
                self._runtime = _default_runtime(self._data_dir, self._cache_bytes, self._keep_volumes)
            await asyncio.gather(self._runtime.start(), asyncio.to_thread(self._load))
        except BaseException:
            listener.close()
            raise
        port = listener.getsockname()[1]
        self.url = f"http://{HOST}:{port}"
        self._registry = SandboxRegistry(
            self._runtime,
            self._envd or _default_envd(),
            clock=self._clock,
            no_way_out=self._no_way_out,
            sizes=self._sizes,
        )
        protocol: type[BoundedProtocol] = BoundedProtocol
        if self._script is not None:
            from managed_e2b.local.chaos.layer import ChaosLayer
            from managed_e2b.local.chaos.wire import ConnectionProtocol

            self._chaos, protocol = ChaosLayer(self._registry, self._clock, self._script), ConnectionProtocol
        self._http = _Http(self._application(port, self._runtime), protocol)
        self._serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        await self._http.ready(self._serving)

    def _load(self) -> None:
        """Import what the SDK's stubs bring with them: most of a second, while the runtime waits for its processes."""
        if self._envd is None:
            _default_envd()

    def _application(self, port: int, runtime: Runtime) -> Gateway:
        now = self._clock.read().wall
        templates = TemplateCatalog(now)
        add_builtin(templates, runtime, now)
        self._volumes = VolumeCatalog(runtime)
        self._builds = Builds(runtime, self.registry.workshop, templates, self._clock, self._mirrors)
        api = control_plane(
            self.registry,
            templates,
            self._builds,
            self._volumes,
            self._clock,
            api_key=self.api_key,
            domain=f"localhost:{port}" if self.tls is None else self.tls.domain,
            extension=self._chaos,
        )
        return Gateway(self.registry, api, signature_matches, self._chaos, api_key=self.api_key, tls=self.tls)

    def state(self) -> keys.ServerState:
        """Where it is and what its clients need, once started."""
        if self.tls is None:
            return keys.ServerState(self.url, self.api_key, os.getpid())
        files = (str(self.tls.authority_file), str(self.tls.bundle_file))
        return keys.ServerState(self.url, self.api_key, os.getpid(), self.tls.domain, *files)

    async def serve_forever(self) -> None:
        """Return when the server has been closed. Raises RuntimeUnavailable once it can make no more sandboxes."""
        if self._serving is None or self._runtime is None:
            raise RuntimeError("the server is not started")
        failed = asyncio.create_task(self._runtime.failed())
        try:
            await asyncio.wait((self._serving, failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed.cancel()
        if failed.done() and not failed.cancelled():
            raise failed.result()
        self._serving.result()

    async def close(self) -> None:
        """Kill all sandboxes and stop listening. May be called again."""
        try:
            if self._chaos is not None:
                await self._chaos.close()
            if self._builds is not None:
                await self._builds.close()
            if self._registry is not None:
                await self._registry.close()
            if self._volumes is not None:
                await self._volumes.close()
        finally:
            if self._http is not None and self._serving is not None:
                self._http.stop()
                await asyncio.wait([self._serving])
            if self._runtime is not None:
                await self._runtime.close()

    async def __aenter__(self) -> LocalServer:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers (what a signal means is the program's business) and without its ticks."""

    def __init__(self, app: Gateway, http: type[BoundedProtocol]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=http,  # on h11, the parser that keeps absolute-form targets whole
                backlog=backlog(),
                ws="none",
                lifespan="off",
                access_log=False,  # signed URLs must not be written down
                log_config=None,
                server_header=False,
                date_header=False,  # a proxied answer brings its own
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=GRACE,
            )
        )
        self._started = asyncio.Event()
        self._stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._started.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # sets the headers that every answer has
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await asyncio.sleep(0)  # so that uvicorn knows, and closes, the connections that asyncio has accepted already
        await super().shutdown(sockets=sockets)
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=GRACE)  # cancelled; each still answers that it failed
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # the client does not read what it was sent
        await asyncio.sleep(0)  # asyncio closes what is aborted in its next turn

    def stop(self) -> None:
        self.should_exit = True
        self._stop.set()

    async def ready(self, serving: asyncio.Task[None]) -> None:
        """Return when it listens; raise what kept it from that."""
        started = asyncio.create_task(self._started.wait())
        try:
            await asyncio.wait((started, serving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            started.cancel()
        if serving.done():
            serving.result()


def _listen(port: int) -> socket.socket:
    # the protocol is named because asyncio sets TCP_NODELAY only then; without it a call takes 40 ms longer
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(backlog())
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _default_runtime(data_dir: Path | None, cache_bytes: int | None, keep_volumes: bool) -> Runtime:
    from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime

    more = {} if cache_bytes is None else {"cache_bytes": cache_bytes}
    return BubblewrapRuntime(data_dir, keep_volumes=keep_volumes, **more)


def _default_envd() -> EnvdFactory:
    from managed_e2b.local.envd.app import Envd

    return Envd


def run_server(
    port: int,
    *,
    data_dir: Path | None = None,
    chaos: Script | None = None,
    tls_domain: str | None = None,
    internet: bool = True,
    registry_mirrors: Mapping[str, str] | None = None,
    cache_bytes: int | None = None,
    keep_volumes: bool = False,
    sizes: Sizes | None = None,
    announce: Callable[[LocalServer], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then kill all sandboxes and return: `me2b serve`.

    The key is E2B_API_KEY when that is set, else a new one; `keys.state_file()` tells the user's other programs.
    `announce` is called once the server listens. Raises RuntimeUnavailable, ValueError for the domain, and OSError: for
    the port and the authority's files, or for the state file when nothing else tells the key.
    """
    key = keys.choose_api_key(os.environ)
    server = LocalServer(
        port,
        key,
        data_dir,
        chaos=chaos,
        tls_domain=tls_domain,
        internet=internet,
        registry_mirrors=registry_mirrors,
        cache_bytes=cache_bytes,
        keep_volumes=keep_volumes,
        sizes=sizes,
    )
    asyncio.run(_run(server, announce))


async def _run(server: LocalServer, announce: Callable[[LocalServer], None] | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    path = keys.state_file()
    try:
        await server.start()
        _publish(path, server)
        log.info("listening on %s", server.url)
        if announce is not None:
            announce(server)
        stopping = asyncio.create_task(stop.wait())
        serving = asyncio.create_task(server.serve_forever())
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        stopping.cancel()
        serving.cancel()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)  # a second one ends it at once
        try:
            await server.close()
        finally:
            keys.remove_state(path, os.getpid())


def _publish(path: Path, server: LocalServer) -> None:
    try:
        keys.write_state(path, server.state())
    except OSError as error:
        if server.api_key != os.environ.get(keys.KEY_VARIABLE):
            raise
        log.warning("`me2b env` will not find this server: %s", error)

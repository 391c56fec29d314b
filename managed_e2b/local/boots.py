"""How a sandbox gets a guest to run in, and an envd to answer for it: at its creation, and when it boots anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from managed_e2b.local.envd.context import EnvdContext
from managed_e2b.local.errors import ApiError, bad_request
from managed_e2b.local.logbook import Level, Logbook
from managed_e2b.local.model import EnvdApp, EnvdFactory, Sandbox, SandboxSpec
from managed_e2b.local.network.ways import Ways
from managed_e2b.local.runtime.base import Guest, GuestSpec, ImageUnavailable, Runtime, RuntimeUnavailable
from managed_e2b.local.runtime.limits import Limits
from managed_e2b.local.runtime.volumes import Mount, MountFailed
from managed_e2b.local.sizes import Size, Sizes, shown
from managed_e2b.local.starting import StartFailed, start_template, tell_end
from managed_e2b.local.tasks import Tasks


class Boots:
    """`on_death` is called when a guest that was watched is dead, whatever ended it."""

    def __init__(
        self,
        runtime: Runtime,
        envd: EnvdFactory,
        ways: Ways,
        tasks: Tasks,
        sizes: Sizes,
        on_death: Callable[[Sandbox, Guest], None],
    ) -> None:
        self._runtime = runtime
        self._envd = envd
        self._ways = ways
        self._tasks = tasks
        self._sizes = sizes
        self._on_death = on_death

    async def guest(self, sandbox_id: str, spec: SandboxSpec, image: str | None = None) -> Guest:
        """A guest as `spec` wants it, of its image or of another.

        Raises ApiError: 404 when the image is gone, 400 when a volume is or cannot be mounted, 503 when the runtime can
        make none, 501 when the image cannot be made here, or the sandbox shall reach what none here reaches.
        """
        try:
            mounts = tuple(Mount(mount.volume_id, mount.path) for mount in spec.volume_mounts)
            guest = await self._runtime.create(sandbox_id, GuestSpec(image or spec.image, self._limits(spec), mounts))
        except KeyError as error:
            raise ApiError(404, f"template '{spec.template_id}' not found") from error
        except MountFailed as error:
            raise bad_request(str(error)) from error
        except ImageUnavailable as error:
            raise ApiError(501, str(error), headers={"Should-Retry": "false"}) from error
        except RuntimeUnavailable as error:
            raise ApiError(503, str(error), headers={"Should-Retry": "false"}) from error
        try:
            await self._ways.open(guest, spec.egress)
        except BaseException:
            await guest.kill()
            raise
        return guest

    def _limits(self, spec: SandboxSpec) -> Limits:
        return self._sizes.limits(spec.cpu_count, spec.memory_mb)

    def size(self, cpu_count: int | None, memory_mb: int | None) -> Size:
        """What a sandbox can use here whose template asks for this."""
        return shown(self._sizes.limits(cpu_count, memory_mb), self._runtime.enforced)

    async def bring_up(self, guest: Guest, spec: SandboxSpec) -> asyncio.Task[None] | None:
        """Run what its template starts, until it is ready. The start command, if there is one, that goes on running.

        Raises ApiError(500) when it does not get ready.
        """
        settings, env = spec.settings, {**spec.settings.env, **spec.env_vars}
        if not settings.start_cmd and not settings.ready_cmd:
            return None
        try:
            return await start_template(guest, settings, env)
        except StartFailed as error:
            text = f"a sandbox of template '{spec.template_id}' did not get ready: {error}"
            raise ApiError(500, text, headers={"Should-Retry": "false"}) from error

    def envd(self, spec: SandboxSpec, guest: Guest, access_token: str | None, logbook: Logbook) -> EnvdApp:
        """envd of a guest."""
        return self._envd(
            EnvdContext(
                sandbox_id=guest.sandbox_id,
                guest=guest,
                access_token=access_token,
                env_vars={**spec.settings.env, **spec.env_vars},
                default_user=spec.settings.user,
                default_workdir=spec.settings.workdir,
                template_id=spec.template_id,
                logbook=logbook,
            )
        )

    def watch(self, sandbox: Sandbox) -> None:
        """Tell of the death of the guest that the sandbox has now."""
        self._tasks.start(self._watch(sandbox, sandbox.guest))

    async def _watch(self, sandbox: Sandbox, guest: Guest) -> None:
        await guest.dead.wait()
        self._on_death(sandbox, guest)

    async def come_up(self, sandbox: Sandbox) -> None:
        """After a boot anew: run what its template starts. That it fails is written down, and the sandbox runs.

        Raises GuestGone.
        """
        try:
            started = await self.bring_up(sandbox.guest, sandbox.spec)
        except ApiError as error:
            sandbox.logbook.add("template", error.message, level=Level.ERROR)
        else:
            tell_end(started, sandbox.logbook)

    async def anew(self, sandbox: Sandbox, image: str) -> None:
        """Give the sandbox a new guest, of that image, and a new envd with the same token; the image is used up.

        Raises ApiError, as `guest`; nothing is changed then.
        """
        # nobody is left in there; but what could not be removed of it then must be gone before its id is used again
        await sandbox.guest.kill()
        guest = await self.guest(sandbox.sandbox_id, sandbox.spec, image)
        try:
            envd = self.envd(sandbox.spec, guest, sandbox.access_token, sandbox.logbook)
        except BaseException:
            await guest.kill()
            raise
        sandbox.guest, sandbox.envd, sandbox.kept = guest, envd, None
        self.watch(sandbox)
        await self._runtime.remove_image(image)

"""One build: from what it begins with, through its steps, to an image that sandboxes are made of.

A step that changes files runs in a sandbox of the image before it, and what it changed is one more layer. So an
unchanged beginning is found in the cache and costs nothing; from the first step that is not, all are run.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from managed_e2b.local.builds import commands, provision, reference, steps
from managed_e2b.local.builds.commands import CommandFailed
from managed_e2b.local.builds.model import (
    BASE_STEP,
    FINALIZE_STEP,
    BuildFailed,
    Level,
    Log,
    Plan,
    Step,
    StepKind,
)
from managed_e2b.local.builds.registry import PullError, Registries, RemoteImage, Unreachable
from managed_e2b.local.errors import ApiError
from managed_e2b.local.runtime.base import Guest, GuestError, GuestGone, ImageUnavailable, Runtime, RuntimeUnavailable
from managed_e2b.local.runtime.library import Layer
from managed_e2b.local.runtime.standins import PATH
from managed_e2b.local.starting import StartFailed, start_template
from managed_e2b.local.templates import DEFAULT_USER, NO_SETTINGS, Found, Settings

HOME = "/home/user"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Stage:
    """Where a build is: an image, with what commands run with, and the key of both; None: it must not be kept."""

    image: str
    settings: Settings
    key: str | None


class Builder:
    """`workshop` makes a guest of an image, `files` tells where the archive of a COPY lies, or None. Used once."""

    def __init__(
        self,
        build_id: str,
        plan: Plan,
        log: Log,
        runtime: Runtime,
        workshop: Callable[[str], Awaitable[Guest]],
        registries: Registries,
        files: Callable[[str], Path | None],
    ) -> None:
        self._build_id = build_id
        self._plan = plan
        self._log = log
        self._runtime = runtime
        self._library = library = runtime.library
        self._workshop = workshop
        self._registries = registries
        self._files = files
        self._one_id = library.one_id
        self._made = 0
        self._names: list[str] = []
        self._fresh = plan.force

    async def run(self) -> Stage:
        """The last stage; its image has the build's id for a name. Raises BuildFailed."""
        try:
            stage = await self._base()
            for number, step in enumerate(self._plan.steps, 1):
                with _failing_as(str(number)):
                    stage = await self._step(stage, number, step)
            with _failing_as(FINALIZE_STEP):
                return await self._finalize(stage)
        finally:
            for name in self._names:
                with contextlib.suppress(KeyError):
                    await self._runtime.remove_image(name)

    # -- what it begins with -----------------------------------------------------------------------------------------

    async def _base(self) -> Stage:
        with _failing_as(BASE_STEP):
            if self._plan.template is not None:
                return await self._from_template(self._plan.template)
            return await self._from_image(self._plan.image or "")

    async def _from_template(self, found: Found) -> Stage:
        name = found.template.alias or found.template.template_id
        self._say(f"FROM TEMPLATE {name}", BASE_STEP, "base")
        image = self._new_name()
        try:
            await self._library.name(found.build.image, image)
        except KeyError as error:
            raise BuildFailed(BASE_STEP, f"template '{name}' not found") from error
        settings = found.build.settings
        if settings.workdir is None and settings.user == DEFAULT_USER:
            settings = replace(settings, workdir=HOME)
        return Stage(image, settings, found.build.key or self._library.identity(image))

    async def _from_image(self, name: str) -> Stage:
        try:
            wanted = reference.parse(name)
        except ValueError as error:
            raise BuildFailed(BASE_STEP, f"invalid image '{name[:256]}': {error}") from error
        version = provision.version(one_id=self._one_id)
        by_name = f"pulled {wanted} {version}"
        try:
            remote = await self._registries.describe(wanted, self._plan.credentials)
        except Unreachable as error:
            known = None if self._fresh else await self._recall(by_name, NO_SETTINGS)
            if known is None:
                raise
            self._log.add(f"{error}: it is used as it was pulled before", level=Level.WARN, step=BASE_STEP)
            return known
        key = hashlib.sha256(repr(("image", remote.digest, remote.layers, version)).encode()).hexdigest()
        cached = None if self._fresh else await self._recall(key, NO_SETTINGS)
        self._say(f"FROM {wanted}", BASE_STEP, "base", cached=cached is not None)
        if cached is not None:
            return cached
        stage = await self._provide(await self._pull(remote), remote, key)
        await self._keep(stage, key, by_name)
        return stage

    async def _pull(self, remote: RemoteImage) -> str:
        size = sum(archive.size for archive in remote.archives)
        self._log.add(f"The image has {len(remote.archives)} layers, {size / 1e6:.1f} MB packed", step=BASE_STEP)

        def layer_of(number: int) -> Layer:
            archive = remote.archives[number]

            async def fetch() -> int:
                self._log.add(
                    f"Pulling layer {number + 1}/{len(remote.archives)} ({archive.size / 1e6:.1f} MB)", step=BASE_STEP
                )
                return await self._registries.fetch(remote, archive)

            return Layer(archive.digest, fetch)

        image = self._new_name()
        left_out = await self._library.assemble(image, [layer_of(number) for number in range(len(remote.archives))])
        if left_out:
            text = f"{left_out} device nodes of the image were left out: a sandbox has its own /dev"
            self._log.add(text, level=Level.WARN, step=BASE_STEP)
        return image

    async def _provide(self, image: str, remote: RemoteImage, key: str) -> Stage:
        """Add what an image lacks to be a sandbox."""
        self._log.add("Provisioning sandbox template", step=BASE_STEP)
        try:
            guest = await self._workshop(image)
        except ApiError as error:
            raise BuildFailed(BASE_STEP, f"{error.message}. An image must have /bin/bash") from error
        async with self._killed_after(guest):
            script = provision.script(one_id=self._one_id)
            output = self._output(BASE_STEP, "base", Level.DEBUG)
            try:
                await commands.run(
                    guest, script, user=commands.ROOT, env={}, cwd="/", login=False, output=output, seconds=300
                )
            except CommandFailed as error:
                told = next((e.message for e in reversed(self._log.entries) if "[stderr]" in e.message), "")
                raise BuildFailed(BASE_STEP, f"this image cannot be a sandbox: {told or error}") from error
            made = await self._commit(guest)
        return Stage(made, Settings(env=dict(remote.env), user=DEFAULT_USER, workdir=HOME), key)

    # -- steps -------------------------------------------------------------------------------------------------------

    async def _step(self, stage: Stage, number: int, step: Step) -> Stage:
        self._fresh = self._fresh or step.force
        key = None if stage.key is None else steps.key_of(stage.key, step)
        cached = None if self._fresh or key is None else await self._recall(key, stage.settings)
        self._say(str(step), str(number), self._prefix(number), cached=cached is not None)
        if cached is not None:
            return cached
        self._fresh = True  # what comes after is made of other files than it was
        made = replace(await self._execute(stage, number, step), key=key)
        if key is not None:
            await self._keep(made, key)
        return made

    async def _execute(self, stage: Stage, number: int, step: Step) -> Stage:
        async with self._guest(stage) as guest:
            match step.kind:
                case StepKind.RUN:
                    await self._run(guest, stage, number, step)
                    return replace(stage, image=await self._commit(guest))
                case StepKind.COPY | StepKind.ADD:
                    await self._copy(guest, stage, number, step)
                    return replace(stage, image=await self._commit(guest))
                case StepKind.ENV | StepKind.ARG:
                    return replace(stage, settings=await self._environment(guest, stage, step))
                case StepKind.WORKDIR:
                    return await self._workdir(guest, stage, step)
                case StepKind.USER:
                    return await self._user(guest, stage, step)

    async def _run(self, guest: Guest, stage: Stage, number: int, step: Step) -> None:
        if not step.args:
            raise steps.BadStep("RUN needs a command")
        settings = stage.settings
        name = step.args[1] if len(step.args) > 1 and step.args[1] else settings.user
        try:
            await commands.run(
                guest,
                step.args[0],
                user=await commands.user_of(guest, name),
                env=steps.command_env(settings.env, PATH),
                cwd=settings.workdir,
                output=self._output(str(number), self._prefix(number), Level.INFO),
            )
        except CommandFailed as error:
            raise CommandFailed(f"failed to run command '{step.args[0]}': {error}") from error

    async def _copy(self, guest: Guest, stage: Stage, number: int, step: Step) -> None:
        settings = stage.settings
        copy = steps.copy_of(step, settings.user)
        archive = self._files(step.files or "")
        if archive is None:
            raise CommandFailed("the files to copy were not uploaded")
        workdir = settings.workdir or (await commands.user_of(guest, settings.user)).home
        inside = f"/tmp/.copy-{secrets.token_hex(8)}"
        reply = await guest.call("open_write", path=inside, uid=0, gid=0, metadata={})
        (target,) = reply.fds
        try:
            await asyncio.to_thread(_pour, archive, target)
        finally:
            os.close(target)
        script = steps.copy_script(copy, inside, workdir)
        output = self._output(str(number), self._prefix(number), Level.WARN)
        try:
            await commands.run(guest, script, user=commands.ROOT, env={}, cwd="/", login=False, output=output)
        except CommandFailed as error:
            told = next((e.message for e in reversed(self._log.entries) if e.step == str(number)), "")
            raise CommandFailed(f"failed to copy files: {error}: {told}") from error

    async def _environment(self, guest: Guest, stage: Stage, step: Step) -> Settings:
        env = dict(stage.settings.env)
        given = steps.pairs(step)
        known = steps.command_env({"PATH": PATH, **env}, PATH) if "PATH" not in env else env
        for name, value in given.items():
            command = steps.expansion(value)
            if command is not None:
                value = await commands.capture(guest, command, user=commands.ROOT, env=dict(known), login=False)
            env[name] = value
        return replace(stage.settings, env=env)

    async def _workdir(self, guest: Guest, stage: Stage, step: Step) -> Stage:
        path = steps.workdir_of(step, stage.settings.workdir or "/")
        made = await self._script(guest, steps.workdir_script(path, stage.settings.user))
        image = await self._commit(guest) if made else stage.image
        return replace(stage, image=image, settings=replace(stage.settings, workdir=path))

    async def _user(self, guest: Guest, stage: Stage, step: Step) -> Stage:
        name, _ = steps.user_of(step)  # everybody may become root with the sandboxes' sudo
        made = await self._script(guest, steps.user_script(name))
        image = await self._commit(guest) if made else stage.image
        return replace(stage, image=image, settings=replace(stage.settings, user=name))

    async def _script(self, guest: Guest, script: str) -> bool:
        """Run a script of ours as root; whether it made something."""
        return bool(await commands.capture(guest, script, user=commands.ROOT, env={}, login=False))

    # -- the end -----------------------------------------------------------------------------------------------------

    async def _finalize(self, stage: Stage) -> Stage:
        plan = self._plan
        if plan.start_cmd or plan.ready_cmd:
            settings = replace(stage.settings, start_cmd=plan.start_cmd or None, ready_cmd=plan.ready_cmd or None)
            stage = replace(stage, settings=settings)
        self._say("Finalizing template build", FINALIZE_STEP, "finalize")
        if stage.settings.start_cmd or stage.settings.ready_cmd:
            await self._try_start(stage)
        await self._library.name(stage.image, self._build_id)
        return replace(stage, image=self._build_id)

    async def _try_start(self, stage: Stage) -> None:
        """Whether sandboxes will come up. What it changes is dropped: it runs again in each of them."""
        async with self._guest(stage) as guest:
            settings = stage.settings
            if settings.start_cmd:
                self._log.add(f"Running start command: {settings.start_cmd}", step=FINALIZE_STEP)
            if settings.ready_cmd:
                self._log.add(f"Waiting for template to be ready: {settings.ready_cmd}", step=FINALIZE_STEP)
            output = self._output(FINALIZE_STEP, "start", Level.INFO)
            try:
                await start_template(guest, settings, settings.env, output)
            except StartFailed as error:
                raise BuildFailed(FINALIZE_STEP, str(error)) from error
            self._log.add("Template is ready", step=FINALIZE_STEP)

    # -- tools -------------------------------------------------------------------------------------------------------

    def _prefix(self, number: int) -> str:
        return f"builder {number}/{len(self._plan.steps)}"

    def _say(self, what: str, step: str, prefix: str, *, cached: bool = False) -> None:
        self._log.add(f"{'CACHED ' if cached else ''}[{prefix}] {what}", step=step)

    def _output(self, step: str, prefix: str, level: Level) -> commands.Output:
        return lambda stream, line: self._log.add(f"[{prefix}] [{stream}]: {line}", level=level, step=step)

    def _new_name(self) -> str:
        self._made += 1
        name = f"{self._build_id}-{self._made}"
        self._names.append(name)
        return name

    async def _recall(self, key: str, before: Settings) -> Stage | None:
        """What steps cannot change, a start command for one, stays as it was before."""
        image = self._new_name()
        note = await self._library.recall(key, image)
        return None if note is None else Stage(image, replace(before, **note["settings"]), note["key"])

    async def _keep(self, stage: Stage, *keys: str) -> None:
        """Let it be found by these keys."""
        settings = stage.settings
        note = {"env": dict(settings.env), "user": settings.user, "workdir": settings.workdir}
        for key in keys:
            await self._library.keep(stage.image, key, {"settings": note, "key": stage.key})

    async def _commit(self, guest: Guest) -> str:
        image = self._new_name()
        await guest.commit(image)
        return image

    @asynccontextmanager
    async def _guest(self, stage: Stage) -> AsyncIterator[Guest]:
        async with self._killed_after(await self._workshop(stage.image)) as guest:
            yield guest

    @asynccontextmanager
    async def _killed_after(self, guest: Guest) -> AsyncIterator[Guest]:
        try:
            yield guest
        finally:
            await asyncio.shield(asyncio.ensure_future(guest.kill()))


def _pour(source: Path, target: int) -> None:
    with open(source, "rb") as file:
        while chunk := file.read(_CHUNK):
            view = memoryview(chunk)
            while view:
                view = view[os.write(target, view) :]


@contextlib.contextmanager
def _failing_as(step: str) -> Any:
    """What goes wrong in a step as its failure. What is nobody's fault but the server's is not caught."""
    try:
        yield
    except (CommandFailed, steps.BadStep, PullError) as error:
        raise BuildFailed(step, str(error)) from error
    except GuestGone as error:
        raise BuildFailed(step, "the sandbox of the build died") from error
    except (RuntimeUnavailable, ImageUnavailable) as error:
        raise BuildFailed(step, str(error)) from error
    except ApiError as error:
        raise BuildFailed(step, error.message) from error
    except OSError as error:
        raise BuildFailed(step, f"the server cannot write: {error.strerror}") from error
    except GuestError as error:
        message = {
            errno.ENOSPC: "there is no space left on the server's disk",
            errno.EMLINK: "the template is made of too many layers: put several commands into one step",
            errno.EOPNOTSUPP: "this server keeps files in memory, where no template can be built",
        }.get(error.errno, error.message)
        raise BuildFailed(step, message) from error

"""Files into a sandbox and out of it, relative to /task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import (
    BackendError,
    RateLimitedError,
    SandboxNotRunning,
    SandboxUnreachableError,
    StageError,
)
from ..rules import arguments
from .base import Acquired, Engine
from .endings import ensure_held, why_failed
from .patience import Hold, patiently


async def stage_in(
    engine: Engine, acquired: Acquired, files: Mapping[str, str | bytes | Path], user: str | None
) -> None:
    """See `SandboxHandle.stage_in`."""
    targets = arguments.contents("stage_in", "files", files)  # all of them first: nothing half done
    user = arguments.optional_text("stage_in", "user", user)
    await ensure_held(engine, acquired)
    for target, (name, content) in targets.items():
        try:
            data = await engine.driver.apart(content.read_bytes) if isinstance(content, Path) else content
            await patiently(engine, engine.driver.sdk.write_file, acquired.sandbox, target, data, user, hold=Hold())
        except OSError as error:
            raise StageError(
                f"cannot stage {name!r}: {content!r} cannot be read ({error.strerror})", path=name
            ) from error
        except (SandboxNotRunning, SandboxUnreachableError) as error:
            raise await why_failed(engine, acquired, error) from error
        except RateLimitedError:
            raise
        except BackendError as error:
            raise StageError(f"cannot stage {name!r} in: {error}", path=name) from error


async def stage_out(engine: Engine, acquired: Acquired, paths: Iterable[str], user: str | None) -> dict[str, bytes]:
    """See `SandboxHandle.stage_out`."""
    sources = arguments.paths("stage_out", "paths", paths)
    user = arguments.optional_text("stage_out", "user", user)
    await ensure_held(engine, acquired)
    found: dict[str, bytes] = {}
    for name, source in sources.items():
        try:
            found[name] = await patiently(
                engine, engine.driver.sdk.read_file, acquired.sandbox, source, user, hold=Hold()
            )
        except FileNotFoundError as error:
            raise StageError(f"cannot stage {name!r} out: there is no {source} in the sandbox", path=name) from error
        except (SandboxNotRunning, SandboxUnreachableError) as error:
            raise await why_failed(engine, acquired, error) from error
        except RateLimitedError:
            raise
        except BackendError as error:
            raise StageError(f"cannot stage {name!r} out: {error}", path=name) from error
    return found

"""Files into a sandbox and out of it, relative to TASK_DIR."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from ..errors import (
    BackendError,
    RateLimitedError,
    SandboxNotRunning,
    SandboxUnreachableError,
    StageError,
    ValidationError,
)
from .base import Acquired, Engine
from .endings import ensure_held, why_failed
from .patience import Hold, patiently

TASK_DIR = "/task"
"""Where staged files go, and the working directory of scripts."""


async def stage_in(
    engine: Engine, acquired: Acquired, files: Mapping[str, str | bytes | Path], user: str | None
) -> None:
    """See `SandboxHandle.stage_in`."""
    targets = {inside(name): (name, content) for name, content in files.items()}  # all names first: nothing half done
    await ensure_held(engine, acquired)
    for target, (name, content) in targets.items():
        try:
            data = _data(content)
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
    if isinstance(paths, str):
        raise ValidationError(f"stage_out({paths!r}): give a list of paths, not one str")
    sources = {name: inside(name) for name in paths}
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


def inside(name: str) -> str:
    """The absolute path in a sandbox of a name relative to TASK_DIR; absolute names stay. Raises ValidationError."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValidationError(f"{name!r} is not a path in a sandbox")
    path = PurePosixPath(name)
    if ".." in path.parts or path == PurePosixPath():
        raise ValidationError(f"{name!r}: a path below {TASK_DIR}, without '..'")
    return str(PurePosixPath(TASK_DIR) / path)


def _data(content: str | bytes | Path) -> bytes:
    if isinstance(content, Path):
        return content.read_bytes()
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    raise ValidationError(f"staged content is str, bytes or pathlib.Path, not {type(content).__name__}")

"""What each instruction means: its arguments, its place in the cache, and the script that does it inside. No I/O."""

from __future__ import annotations

import hashlib
import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from managed_e2b.local.builds.model import Step

_GLOB = re.compile(r"[*?\[{\\]")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?")
_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?")
_MODE = re.compile(r"[0-7]{1,4}|[ugoa]*[-+=][rwxXst]*(?:,[ugoa]*[-+=][rwxXst]*)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class BadStep(Exception):
    """An instruction that cannot be carried out as it is written."""


def key_of(before: str, step: Step) -> str:
    """What the files are after a step, told by what they were before and what the step is."""
    text = repr((before, str(step.kind), step.args, step.files))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def pairs(step: Step) -> dict[str, str]:
    """The variables of ENV, unexpanded. Raises BadStep."""
    if not step.args or len(step.args) % 2:
        raise BadStep(f"{step.kind} needs names and values in turn")
    found = dict(zip(step.args[::2], step.args[1::2], strict=True))
    bad = next((name for name in found if not _VARIABLE.fullmatch(name)), None)
    if bad is not None:
        raise BadStep(f"{step.kind}: '{bad[:64]}' is no name of a variable")
    return found


def expansion(value: str) -> str | None:
    """A command that prints a value with its `$NAME` and `${NAME}` replaced, and nothing run; None: there are none."""
    if "$" not in value:
        return None
    quoted = re.sub(r'[\\"`]|\$\(|\$\[', lambda found: "\\" + found[0], value)
    return f'printf %s "{quoted}"'


@dataclass(frozen=True)
class Copy:
    """`source` is where the files lie in the archive, `target` as given; `owner` is `user[:group]`."""

    source: str
    target: str
    owner: str
    mode: str


def copy_of(step: Step, user: str) -> Copy:
    """Raises BadStep."""
    if len(step.args) < 2:
        raise BadStep(f"{step.kind} needs a source and a target")
    if not step.files:
        raise BadStep(f"{step.kind} needs files to be uploaded first")
    source, target, owner, mode = (*step.args, "", "", "", "")[:4]
    owner = owner or user
    if not _OWNER.fullmatch(owner):
        raise BadStep(f"{step.kind}: '{owner[:64]}' is no user")
    if mode and not _MODE.fullmatch(mode):
        raise BadStep(f"{step.kind}: '{mode[:64]}' is no mode")
    if not target or "\0" in source + target:
        raise BadStep(f"{step.kind} needs a source and a target")
    return Copy(_fixed_part(source), target, owner if ":" in owner else f"{owner}:{owner}", mode)


def _fixed_part(source: str) -> str:
    """The path without what a pattern may mean: the archive holds its matches already. `.`: all of it."""
    kept: list[str] = []
    for part in posixpath.normpath(source).split("/"):
        if _GLOB.search(part):
            break
        if part not in ("", ".", ".."):
            kept.append(part)
    return "/".join(kept) or "."


def copy_script(copy: Copy, archive: str, workdir: str) -> str:
    """Unpack the archive beside itself and put what it holds in place, as Docker's COPY does.

    A file or a link goes to the target's path, or into it when that ends with a slash; what is in a directory is merged
    into the target.
    """
    target = posixpath.join(workdir, copy.target) if not copy.target.startswith("/") else copy.target
    values = {"archive": archive, "source": copy.source, "target": target, "owner": copy.owner, "mode": copy.mode}
    return "\n".join(f"{name}={shlex.quote(value)}" for name, value in values.items()) + _COPY


_COPY = """
set -eu
command -v tar >/dev/null || { echo 'COPY needs tar in the image' >&2; exit 1; }
place=$archive.d
trap 'chmod -R u+rwX "$place" 2>/dev/null; rm -rf "$place" "$archive"' EXIT
mkdir -m 700 "$place"
tar -xf "$archive" -C "$place" --no-same-owner
from=$place/$source
if [ ! -e "$from" ] && [ ! -L "$from" ]; then
  echo "nothing to copy: there is no $source among the uploaded files" >&2
  exit 1
fi
if [ -d "$from" ] && [ ! -L "$from" ]; then
  chown -hR "$owner" "$from"
  [ -z "$mode" ] || chmod -R "$mode" "$from"
  mkdir -p "$target"
  tar -cf - -C "$from" . | tar -xf - -C "$target" --keep-directory-symlink --no-overwrite-dir
else
  chown -h "$owner" "$from"
  [ -z "$mode" ] || [ -L "$from" ] || chmod "$mode" "$from"
  case $target in
    */) mkdir -p "$target" ;;
    *) mkdir -p "$(dirname "$target")" ;;
  esac
  mv -f "$from" "$target"
fi
"""


def workdir_of(step: Step, before: str) -> str:
    """The absolute path that WORKDIR means. Raises BadStep."""
    if not step.args or not step.args[0] or "\0" in step.args[0]:
        raise BadStep("WORKDIR needs a path")
    return "/" + posixpath.normpath(posixpath.join(before, step.args[0])).lstrip("/")


def workdir_script(path: str, user: str) -> str:
    """Make the directory and what is missing above it, for `user`; prints `made` when there was something to make."""
    return f"target={shlex.quote(path)}\nowner={shlex.quote(f'{user}:{user}')}\n" + _WORKDIR


_WORKDIR = """
set -eu
[ ! -d "$target" ] || exit 0
first=$target
while [ ! -d "$(dirname "$first")" ]; do first=$(dirname "$first"); done
mkdir -p "$target"
chown -R "$owner" "$first"
echo made
"""


def user_of(step: Step) -> tuple[str, bool]:
    """The name that USER means, and whether they may become root. Raises BadStep."""
    name = step.args[0] if step.args else ""
    if not _USER.fullmatch(name):
        raise BadStep("USER needs the name of a user" if not name else f"'{name[:64]}' is no name of a user")
    return name, len(step.args) > 1 and step.args[1] == "true"


def user_script(name: str) -> str:
    """Make the user when there is none; prints `made` then."""
    return f"""
set -eu
if ! id -u {name} >/dev/null 2>&1; then
  useradd --create-home --shell /bin/bash {name} >&2
  echo made
fi
"""


def command_env(env: Mapping[str, str], path: str) -> dict[str, str]:
    """A step's environment: where programs usually lie is always in its PATH."""
    return {**env, "PATH": f"{env['PATH']}:{path}"} if "PATH" in env else dict(env)

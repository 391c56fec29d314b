"""The layer of template `code-interpreter-v1`: a Python environment with a kernel, and the service that runs it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from managed_e2b.local.interpreter import inside, packages, pythons

PORT = 49999
HOME = "/opt/me2b/code-interpreter"
START = f"{HOME}/bin/serve"
"""Runs the service, and again when it ends. Needs no privilege: it becomes root by itself, as upstream's does."""

_SERVICE = "me2b_code_interpreter"
_PACKAGES = f"{HOME}/lib/python{pythons.VERSION}/site-packages"

_COMMANDS = {"python": "python3", "python3": "python3", "pip": "pip", "pip3": "pip"}
"""What commands in the sandbox find under these names."""

_SERVE = f"""#!/bin/sh
# Runs the service on port {PORT}, and again when it ends.
[ "$(id -u)" = 0 ] || ! command -v sudo >/dev/null || exec sudo -E -- "$0"
export HOME=/root USER=root LOGNAME=root PATH="{HOME}/bin:$PATH"
cd /
while :; do
  {HOME}/bin/python3 -I -m {_SERVICE}
  sleep 1
done
"""

_KERNEL_CONFIG = """c = get_config()
c.InteractiveShellApp.extensions = ["me2b_code_interpreter.display"]
c.InteractiveShell.colors = "nocolor"
c.PlainTextFormatter.max_seq_length = 0
c.HistoryManager.hist_file = ":memory:"
"""


def _kernel(module: str, language: str, *more: str) -> str:
    argv = [f"{HOME}/bin/python3", "-m", module, "-f", "{connection_file}", *more]
    return json.dumps({"argv": argv, "display_name": language, "language": language})


def _files() -> dict[str, str]:
    """Beside the packages, below `HOME`."""
    return {
        "bin/serve": _SERVE,
        "bin/pip": f"#!{HOME}/bin/python3\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n",
        "etc/ipython_kernel_config.py": _KERNEL_CONFIG,
        "share/jupyter/kernels/me2b-python/kernel.json": _kernel(
            "ipykernel_launcher", "python", f"--config={HOME}/etc/ipython_kernel_config.py"
        ),
        "share/jupyter/kernels/me2b-bash/kernel.json": _kernel("bash_kernel", "bash"),
    }


class InterpreterRecipe:
    """`runtime.base.Recipe`."""

    def digest(self) -> str:
        python = pythons.choose()
        names = [f"{found.metadata['Name']} {found.version}" for found in packages.distributions()]
        text = hashlib.sha256(repr((python, names)).encode())
        for path in sorted([*_sources(), *(Path(each) for each in (__file__, packages.__file__, pythons.__file__))]):
            text.update(path.read_bytes())
        return text.hexdigest()

    def fill(self, layer: Path) -> None:
        python = pythons.choose()
        if python.source is not None:
            pythons.copy(python.source, layer)
        home = layer / "root" / HOME.lstrip("/")
        for distribution in packages.distributions():
            packages.copy(distribution, layer / "root" / _PACKAGES.lstrip("/"), _PACKAGES)
        for path in _sources():
            packages.copy_module(path, layer / f"root{_PACKAGES}" / _SERVICE / path.name, f"{_PACKAGES}/{_SERVICE}")
        for name, text in _files().items():
            _write(home / name, text, executable=name.startswith("bin/"))
        _environment(home, python.program)
        for name, target in _COMMANDS.items():
            _write(layer / "usr/local/bin" / name, _wrapper(f"{HOME}/bin/{target}"), executable=True)


def _sources() -> list[Path]:
    return [path for path in Path(inside.__file__).parent.iterdir() if path.suffix in (".py", ".js")]


def _environment(home: Path, program: str) -> None:
    """As the module venv makes one."""
    settings = {
        "home": str(Path(program).parent),
        "include-system-site-packages": "false",
        "version": pythons.VERSION,
    }
    _write(home / "pyvenv.cfg", "".join(f"{name} = {value}\n" for name, value in settings.items()))
    for name in ("python", "python3", f"python{pythons.VERSION}"):
        (home / "bin" / name).symlink_to(program)


def _wrapper(program: str) -> str:
    """A program elsewhere that is what it is by where it lies: a link would not do."""
    return f'#!/bin/sh\nexec {program} "$@"\n'


def _write(path: Path, text: str, *, executable: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755 if executable else 0o644)

"""The Python packages of the interpreter's layer: those installed beside the server, no download.

`REQUIRED` are those of the extra `code-interpreter`; of `WELCOME`, which code of users likes to find, whichever are
installed. With each comes what it depends on.
"""

from __future__ import annotations

import importlib.metadata as metadata
import marshal
import re
import shutil
from collections.abc import Iterator
from importlib.util import cache_from_source
from pathlib import Path
from types import CodeType

from managed_e2b.local.runtime.base import ImageUnavailable

REQUIRED = ("ipykernel", "jupyter-client", "tornado")
WELCOME = (
    "bash-kernel", "e2b-charts", "pip",
    "aiohttp", "beautifulsoup4", "bokeh", "httpx", "imageio", "joblib", "lxml", "matplotlib", "networkx", "nltk",
    "numba", "numpy", "opencv-python", "openpyxl", "pandas", "pillow", "plotly", "polars", "pyarrow", "pytest",
    "python-docx", "pytz", "pyyaml", "requests", "scikit-image", "scikit-learn", "scipy", "seaborn", "setuptools",
    "soundfile", "statsmodels", "sympy", "tabulate", "textblob", "tqdm", "urllib3", "xarray", "xlrd",
)  # fmt: skip
_LEFT_OUT = ("debugpy", "jedi", "parso")
"""An editor's companions, which weigh more than all the rest of the kernel; IPython does without them."""

INSTALL = "pip install 'managed-e2b[code-interpreter]'"
_PYC_HEADER = 16


def distributions() -> list[metadata.Distribution]:
    """All that belong into the layer, by name. Raises ImageUnavailable when a required one is missing."""
    found: dict[str, metadata.Distribution] = {}
    for name in REQUIRED:
        if _find(name) is None:
            raise ImageUnavailable(f"code-interpreter-v1 needs {name} beside the server: {INSTALL}")
    pending = [*REQUIRED, *WELCOME]
    while pending:
        name = _canonical(pending.pop())
        if name in found or name in _LEFT_OUT or (distribution := _find(name)) is None:
            continue
        found[name] = distribution
        pending += _needed(distribution)
    return [found[name] for name in sorted(found)]


def _find(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _needed(distribution: metadata.Distribution) -> Iterator[str]:
    from packaging.requirements import Requirement  # ipykernel brings it

    for line in distribution.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def copy(distribution: metadata.Distribution, target: Path, place: str) -> None:
    """Copy the modules of one into `target`, which will be `place` inside. Raises ImageUnavailable and OSError.

    Only what its installation recorded, and of that nothing outside of the directory of packages, and no tests.
    """
    files = distribution.files
    if files is None:
        name = distribution.metadata["Name"]
        raise ImageUnavailable(f"the files of {name} are not recorded, it was not installed by pip: {INSTALL}")
    for file in files:
        parts = Path(file).parts
        if ".." in parts or file.is_absolute() or "tests" in parts or "__pycache__" in parts:
            continue
        copy_module(Path(str(distribution.locate_file(file))), target / file, f"{place}/{file}")


def copy_module(source: Path, target: Path, place: str) -> None:
    """Copy a file; of a module its compiled form too, which then names `place` and not where it was on the host."""
    if not source.is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    if source.suffix != ".py":
        return
    try:
        compiled = Path(cache_from_source(str(source))).read_bytes()
        code = marshal.loads(compiled[_PYC_HEADER:])
    except (OSError, ValueError, EOFError, TypeError):
        return  # it is compiled when it is imported
    cached = Path(cache_from_source(str(target)))
    cached.parent.mkdir(exist_ok=True)
    cached.write_bytes(compiled[:_PYC_HEADER] + marshal.dumps(_renamed(code, place)))


def _renamed(code: CodeType, place: str) -> CodeType:
    inner = tuple(_renamed(item, place) if isinstance(item, CodeType) else item for item in code.co_consts)
    return code.replace(co_filename=place, co_consts=inner)

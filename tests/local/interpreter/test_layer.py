"""What goes into the template's layer: which packages, which files of them, which Python."""

from __future__ import annotations

import importlib.metadata as metadata
import marshal
import py_compile
import sys
import sysconfig
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from managed_e2b.local.interpreter import packages, pythons, recipe
from managed_e2b.local.runtime.base import ImageUnavailable


class Fake(metadata.PathDistribution):
    def __init__(self, site: Path, name: str, files: dict[str, str], requires: str = "") -> None:
        info = site / f"{name.replace('-', '_')}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1\n{requires}")
        for path, text in files.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(text)
        (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
        super().__init__(info)


def test_each_comes_with_what_it_needs_and_no_more(tmp_path, monkeypatch):
    there = {
        "ipykernel": Fake(tmp_path, "ipykernel", {}, 'Requires-Dist: A.b_c\nRequires-Dist: x; extra == "more"\n'),
        "jupyter-client": Fake(tmp_path, "jupyter-client", {}, 'Requires-Dist: y; python_version < "3"\n'),
        "tornado": Fake(tmp_path, "tornado", {}, "Requires-Dist: jedi\n"),
        "a-b-c": Fake(tmp_path, "A.b_c", {}, "Requires-Dist: ipykernel\n"),
        **{name: Fake(tmp_path, name, {}) for name in ("x", "y", "jedi", "pandas", "secret-tool")},
    }
    monkeypatch.setattr(packages, "_find", lambda name: there.get(name))
    names = [found.metadata["Name"] for found in packages.distributions()]
    assert names == ["A.b_c", "ipykernel", "jupyter-client", "pandas", "tornado"]


@pytest.mark.parametrize("missing", packages.REQUIRED)
def test_a_missing_one_is_named_with_what_to_install(monkeypatch, missing):
    monkeypatch.setattr(packages, "_find", lambda name: None if name == missing else object())
    with pytest.raises(ImageUnavailable, match=rf"needs {missing} .*pip install 'managed-e2b\[code-interpreter\]'"):
        packages.distributions()


def test_only_modules_are_copied_and_nothing_of_the_host_is_named(tmp_path):
    site, target = tmp_path / "site", tmp_path / "target"
    fake = Fake(
        site,
        "fake",
        {
            "fake/__init__.py": "def f():\n    return lambda: 1\n",
            "fake/data.bin": "data",
            "fake/tests/test_it.py": "1",
            "../outside": "secret",
            "../../bin/fake": "program",
        },
    )
    py_compile.compile(str(site / "fake/__init__.py"))
    packages.copy(fake, target, "/opt/place")
    copied = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    cached = str(Path(cache_from_source("fake/__init__.py")))
    assert copied == sorted(["fake/__init__.py", "fake/data.bin", cached])
    compiled = (target / cached).read_bytes()
    assert str(site).encode() not in compiled
    code = marshal.loads(compiled[16:])
    assert code.co_filename == "/opt/place/fake/__init__.py"
    inner = next(item for item in code.co_consts if hasattr(item, "co_filename"))
    assert inner.co_filename == code.co_filename
    assert (target / "fake/__init__.py").stat().st_mtime == (site / "fake/__init__.py").stat().st_mtime


def test_a_broken_compiled_form_is_left_out(tmp_path):
    source = tmp_path / "a.py"
    source.write_text("1")
    cached = Path(cache_from_source(str(source)))
    cached.parent.mkdir()
    cached.write_bytes(b"\0" * 16 + b"rubbish")
    packages.copy_module(source, tmp_path / "out" / "a.py", "/place/a.py")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.py"]


def test_what_no_installer_recorded_is_refused(tmp_path):
    fake = Fake(tmp_path, "fake", {})
    (tmp_path / "fake-1.dist-info" / "RECORD").unlink()
    with pytest.raises(ImageUnavailable, match="fake"):
        packages.copy(fake, tmp_path / "target", "/place")


def test_our_own_python_fits_where_everybody_may_run_it(tmp_path, monkeypatch):
    assert not pythons.fits(str(tmp_path))
    assert not pythons.fits("/there/is/none")
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)
    assert not pythons.fits(str(program))
    program.chmod(0o755)
    assert pythons.fits(str(program))
    other = f"#!/bin/sh\necho not-{sysconfig.get_config_var('SOABI')}\n"
    program.write_text(other)
    assert not pythons.fits(str(program))


def test_without_one_below_usr_ours_is_copied(monkeypatch, tmp_path):
    monkeypatch.setattr(pythons, "fits", lambda program: False)
    chosen = pythons.choose()
    assert chosen.program == f"{pythons.COPY}/bin/python{pythons.VERSION}"
    assert chosen.source == Path(sys.base_prefix).resolve()
    with pytest.raises(ImageUnavailable, match="cannot run a copy"):
        pythons.copy(chosen.source, tmp_path)


def test_the_digest_tells_of_what_is_in_the_layer(monkeypatch):
    pytest.importorskip("ipykernel", reason="the extra code-interpreter is not installed")
    first = recipe.InterpreterRecipe().digest()
    assert recipe.InterpreterRecipe().digest() == first
    monkeypatch.setattr(packages, "WELCOME", ())
    assert recipe.InterpreterRecipe().digest() != first

"""Advice in messages fits how the package was installed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from rowstead.spec import errors
from rowstead.spec.errors import install_command


def test_in_a_clone_an_extra_is_installed_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "my clone" / "src" / "rowstead" / "spec" / "errors.py"
    module.parent.mkdir(parents=True)
    clone = tmp_path / "my clone"
    (clone / "pyproject.toml").touch()
    monkeypatch.setattr(errors, "__file__", str(module))
    monkeypatch.chdir(clone)
    assert install_command("tune") == "pip install -e '.[tune]'"
    monkeypatch.chdir(tmp_path)
    assert shlex.split(install_command("tune")) == ["pip", "install", "-e", f"{clone}[tune]"]


def test_an_installed_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "lib" / "python3.11" / "site-packages" / "rowstead" / "spec" / "errors.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(errors, "__file__", str(module))
    assert install_command("tune") == "pip install 'rowstead[tune]'"

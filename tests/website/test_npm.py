"""What the site takes from npm, and what happens where that cannot be had."""

import importlib.util
import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs")
FILE = Path(__file__).parents[2] / "docs" / "npm" / "hook.py"


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """The hook with a folder of its own, on a machine without npm."""
    spec = importlib.util.spec_from_file_location("npm_hook", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BUILD", tmp_path / "npm")
    monkeypatch.setenv("PATH", "")
    return module


def test_without_npm_the_site_is_built_with_a_warning(hook, capsys):
    config = SimpleNamespace(extra_css=["own.css"], extra_javascript=["own.js"])
    assert hook.on_config(config) is config
    assert (config.extra_css, config.extra_javascript) == (["own.css"], ["own.js"])
    said = capsys.readouterr().err
    assert all(name in said for name in hook.WANTED) and "npm is not installed" in said
    assert hook.on_files([], config) == []


def test_an_archive_that_is_not_the_pinned_one_is_refused(hook, monkeypatch):
    def pack(name, target):
        archive = target / "other.tgz"
        archive.write_bytes(b"something else")
        return archive

    monkeypatch.setattr(hook, "pack", pack)
    with pytest.raises(hook.Unavailable, match="sha256"):
        hook.fetch("katex")
    assert not hook.folder("katex").exists()


def test_only_the_files_that_are_wanted_are_unpacked(hook, tmp_path):
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as tar:
        for name in ("package/dist/a.js", "package/dist/a.map", "package/../../b.js"):
            entry = tarfile.TarInfo(name)
            entry.size = 2
            tar.addfile(entry, io.BytesIO(b"ok"))
    hook.unpack(tmp_path / "a.tgz", ("dist/*.js",), tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").rglob("*") if p.is_file()] == ["a.js"]


def test_every_package_is_pinned(hook):
    package = json.loads((FILE.parent / "package.json").read_text())
    assert set(package["dependencies"]) == set(package["sha256"]) == set(hook.WANTED)
    assert all(version[0].isdigit() for version in package["dependencies"].values())

"""A hook of mkdocs: packages from npm that pages need are put into the site, so that readers need no other server.

`npm pack` fetches the versions of `package.json` once into `build/npm`; of each package only the files named here go
into the site. Where npm or the network is missing, the site is built without them: formulas stay in TeX, the page to
play with says what to do, and a warning says why. (It does not go through mkdocs, where `--strict` makes it an error.)
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "npm"
WANTED = {  # patterns of the files that the site needs
    "katex": ("LICENSE", "dist/katex.min.js", "dist/katex.min.css", "dist/fonts/*.woff2"),
    "onnxruntime-web": ("dist/ort.wasm.bundle.min.mjs", "dist/ort-wasm-simd-threaded.wasm"),
}


class Unavailable(Exception):
    """A package cannot be had here; the message says why."""


def on_config(config: Any) -> Any:
    """Fetch what is missing, and load KaTeX on every page if it is there."""
    for name in WANTED:
        try:
            fetch(name)
        except Unavailable as reason:
            print(f"WARNING - the site is built without {name}: {reason}", file=sys.stderr)
    if folder("katex").is_dir():
        config.extra_css.insert(0, "packages/katex/dist/katex.min.css")
        config.extra_javascript.insert(0, "packages/katex/dist/katex.min.js")
    return config


def on_files(files: Any, config: Any) -> Any:
    for name in WANTED:
        for path in sorted(folder(name).rglob("*")):
            if path.is_file():
                address = f"packages/{name}/{path.relative_to(folder(name)).as_posix()}"
                files.append(File.generated(config, address, abs_src_path=str(path)))
    return files


def fetch(name: str) -> None:
    """Put the wanted files of a package into its folder, all or none."""
    if folder(name).is_dir():
        return
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as temporary:
        archive = pack(name, Path(temporary))
        if hashlib.sha256(archive.read_bytes()).hexdigest() != _package("sha256", name):
            raise Unavailable(f"{archive.name} is not the file whose sha256 docs/npm/package.json names")
        files = Path(temporary) / "files"
        unpack(archive, WANTED[name], files)
        shutil.move(files, folder(name))


def pack(name: str, target: Path) -> Path:
    """The package's archive, from whichever registry npm is set to."""
    npm = shutil.which("npm")
    if npm is None:
        raise Unavailable("npm is not installed; install Node.js, and run make docs again")
    version = _package("dependencies", name)
    command = [npm, "pack", "--silent", "--pack-destination", str(target), f"{name}@{version}"]
    done = subprocess.run(command, cwd=target, capture_output=True, text=True)
    archive = target / f"{name}-{version}.tgz"
    if done.returncode or not archive.is_file():
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise Unavailable(f"npm pack {name}@{version} failed ({said}); is there a network?")
    return archive


def unpack(archive: Path, wanted: tuple[str, ...], target: Path) -> None:
    """Files of an npm archive (all are in a folder `package`) that match one of the patterns."""
    with tarfile.open(archive) as tar:
        for member in tar:
            inside = member.name.partition("/")[2]
            if member.isfile() and any(fnmatch(inside, pattern) for pattern in wanted):
                path = target / inside
                path.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None
                path.write_bytes(content.read())


def folder(name: str) -> Path:
    return BUILD / f"{name}-{_package('dependencies', name)}"


def _package(key: str, name: str) -> str:
    return json.loads((HERE / "package.json").read_text(encoding="utf-8"))[key][name]

"""The promises of the source tree: what is packaged, who may import whom, what stays out of a file."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("bootstrap", "models", "node", "protocol")

# --- packaging ------------------------------------------------------------------------------------


def _pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _sources(room: str) -> list[Path]:
    return sorted(p for p in (ROOT / room).rglob("*.py") if "__pycache__" not in p.parts)


def _package(folder: Path) -> str:
    return ".".join(("gossamer", *folder.relative_to(ROOT).parts))


def test_every_folder_with_modules_is_a_listed_package():
    folders = {path.parent for room in ROOMS for path in _sources(room)}
    bare = sorted(str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").is_file())
    assert not bare, f"add an __init__.py to {bare}: without one they are not installed"
    listed = set(_pyproject()["tool"]["setuptools"]["packages"])
    there = {_package(folder) for folder in folders}
    assert not there - listed, (
        f"add to [tool.setuptools] packages in pyproject.toml: {sorted(there - listed)}"
    )
    assert not listed - there, f"pyproject.toml lists packages that do not exist: {sorted(listed - there)}"


def test_gossamer_is_a_namespace_package():
    assert not (ROOT / "__init__.py").exists()
    assert set(_pyproject()["tool"]["setuptools"]["package-dir"].items()) == {
        (f"gossamer.{room}", room) for room in ROOMS
    }


@pytest.mark.parametrize("room", ROOMS)
def test_py_typed_is_there(room):
    assert (ROOT / room / "py.typed").is_file()


def _tracked_or_new() -> list[str]:
    """The files of the checkout that git does not ignore, relative to its top."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        out = subprocess.run(git, check=True, capture_output=True, timeout=200).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return sorted({name for name in out.decode().split("\0") if name and (ROOT / name).is_file()})


def test_the_wheel_has_every_file_and_imports(tmp_path):
    """Build a wheel from a copy (so that nothing is left in the checkout), unpack it and use it."""
    files = [n for n in _tracked_or_new() if n.split("/")[0] in ROOMS or n in ("README.md", "LICENSE")]
    for name in [*files, "pyproject.toml"]:
        target = tmp_path / "src" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=tmp_path / "src",
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wheel = tmp_path / done.stdout.splitlines()[-1]
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    missing = {n for n in files if n.split("/")[0] in ROOMS and f"gossamer/{n}" not in inside}
    assert not missing, f"not in the wheel; see [tool.setuptools.package-data]: {sorted(missing)}"
    assert not {n for n in inside if not n.startswith(("gossamer/", "gossamer-"))}
    assert "gossamer/__init__.py" not in inside

    # -S: without site-packages' .pth files, which is how an editable install gets in.
    use = (
        "import sys; sys.path[:0] = sys.argv[1:]; import gossamer.protocol as p; "
        "assert p.__file__.startswith(sys.argv[1]), p.__file__"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", use, str(tmp_path / "site"), sysconfig.get_path("purelib")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- who may import what --------------------------------------------------------------------------

# `protocol` is a pure function of what it is given: nothing that waits, reaches out, tells the time,
# rolls dice, starts something, or runs code that came as data.
IMPURE = frozenset(
    """
    _thread aiohttp asyncio atexit calendar cProfile concurrent ctypes curses datetime fcntl ftplib
    getpass glob http imaplib importlib locale marshal mmap multiprocessing os pathlib pickle platform
    poplib psutil pty queue random readline resource runpy sched secrets select selectors shelve shutil
    signal smtplib socket socketserver sqlite3 ssl subprocess tempfile termios threading time torch
    urllib uuid uvloop webbrowser wsgiref xmlrpc zoneinfo
    """.split()
) | {"numpy.random"}
IMPURE_CALLS = frozenset({"__import__", "breakpoint", "compile", "eval", "exec", "input", "open", "print"})

FORBIDDEN = {
    "protocol": ("gossamer.node", "gossamer.models", "gossamer.bootstrap"),
    "models": ("gossamer.node", "gossamer.protocol", "gossamer.bootstrap"),
    "node": ("gossamer.bootstrap",),
    "bootstrap": (),
}
LOADERS = {"__import__", "import_module"}


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that is imported anywhere in a module of `package`.

    `from a import b` gives both a and a.b, since b may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parent = ".".join(parts[: len(parts) - node.level + 1])
                base = f"{parent}.{base}" if base else parent
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and _name(node.func).split(".")[-1] in LOADERS:
            first = node.args[0]
            yield node.lineno, first.value if isinstance(first, ast.Constant) else "?"


def _name(node: ast.expr) -> str:
    """'a.b.c' for such an expression, else ''."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _name(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _within(name: str, modules: tuple[str, ...] | frozenset[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:i]) in modules for i in range(1, len(parts) + 1))


def _impurities(source: str, package: str = "gossamer.protocol") -> list[str]:
    tree = ast.parse(source)
    found = [
        f"line {line}: imports {name}" for line, name in _imports(tree, package) if _within(name, IMPURE)
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            found.append(f"line {node.lineno}: calls {node.func.id}()")
        elif isinstance(node, ast.Attribute) and _name(node) in ("np.random", "numpy.random"):
            found.append(f"line {node.lineno}: uses {_name(node)}")
    return found


def _wrong_directions(source: str, room: str, package: str) -> list[str]:
    banned = FORBIDDEN[room] + ROOMS  # a bare `import node` finds some other package, or none
    return [
        f"line {line}: imports {name}"
        for line, name in _imports(ast.parse(source), package)
        if _within(name, banned)
    ]


def _each(room: str) -> Iterator[tuple[str, str, str]]:
    paths = _sources(room)
    assert paths, f"no modules in {room}/"
    for path in paths:
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"), _package(path.parent)


def test_protocol_is_pure():
    found = [
        f"{path} {what}" for path, text, package in _each("protocol") for what in _impurities(text, package)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_dependency_direction(room):
    found = [
        f"{path} {what}"
        for path, text, package in _each(room)
        for what in _wrong_directions(text, room, package)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os.path",
        "from asyncio import sleep",
        "import numpy.random",
        "from numpy import random",
        "import numpy as np\nx = np.random.default_rng(0)",
        "def f():\n    import torch",
        "from concurrent.futures import ThreadPoolExecutor",
        "x = __import__('json')",
        "import importlib\nimportlib.import_module('math')",
        "open('x')",
    ],
)
def test_the_purity_check_sees(source):
    assert _impurities(source)


@pytest.mark.parametrize("source", ["import numpy as np", "from . import limits", "import math", "f.open()"])
def test_the_purity_check_lets_pass(source):
    assert not _impurities(source)


@pytest.mark.parametrize(
    ("room", "package", "source"),
    [
        ("protocol", "gossamer.protocol", "import gossamer.node.daemon.daemon"),
        ("protocol", "gossamer.protocol", "from gossamer import node"),
        ("protocol", "gossamer.protocol", "from .. import node"),
        ("protocol", "gossamer.protocol.codecs", "from ...models import gpt"),
        ("models", "gossamer.models", "from gossamer.protocol import layout"),
        ("node", "gossamer.node", "if x:\n    from gossamer.bootstrap.cli import main as cli"),
        ("node", "gossamer.node", "import importlib\nimportlib.import_module('gossamer.bootstrap.cli.main')"),
        ("bootstrap", "gossamer.bootstrap", "import node"),
    ],
)
def test_the_direction_check_sees(room, package, source):
    assert _wrong_directions(source, room, package)


@pytest.mark.parametrize(
    ("room", "package", "source"),
    [
        ("protocol", "gossamer.protocol.codecs", "from .. import limits\nfrom ..wire import pack"),
        ("node", "gossamer.node", "from gossamer.protocol import merge\nfrom gossamer.models import gpt"),
        ("bootstrap", "gossamer.bootstrap", "import gossamer.node.daemon.daemon"),
        ("node", "gossamer.node", "from gossamer.node import nodes, models_cache"),
    ],
)
def test_the_direction_check_lets_pass(room, package, source):
    assert not _wrong_directions(source, room, package)


def _module(path: Path) -> str:
    return _package(path.parent) if path.stem == "__init__" else f"{_package(path.parent)}.{path.stem}"


def test_nothing_is_imported_in_a_circle():
    """Neither inside functions nor for types alone: what lies deeper does not know who uses it."""
    modules = {_module(path): path for room in ROOMS for path in _sources(room) if path.stem != "__init__"}
    arrows = {}
    for module, path in modules.items():
        found = _imports(ast.parse(path.read_text(encoding="utf-8")), _package(path.parent))
        arrows[module] = {name for _, name in found} & modules.keys()
    TopologicalSorter(arrows).prepare()


def _part(module: str) -> str:
    """The folder inside its room that a module lies in, or itself if it lies in none."""
    return ".".join(module.split(".")[:3])


def test_no_folder_is_imported_in_a_circle():
    """So that each can be read without those above it, and `docs/architecture.md` can have them in order."""
    faces = {_module(ROOT / room / "__init__.py") for room in ROOMS}  # these import on demand
    arrows: dict[str, set[str]] = {}
    for path in (path for room in ROOMS for path in _sources(room)):
        found = _imports(ast.parse(path.read_text(encoding="utf-8")), _package(path.parent))
        of, to = _part(_module(path)), {_part(name) for _, name in found if name.startswith("gossamer.")}
        arrows.setdefault(of, set()).update(to - faces - {of})
    for face in faces:
        del arrows[face]
    TopologicalSorter(arrows).prepare()


def _loaded_by(statement: str, names: tuple[str, ...], cwd: Path) -> list[str]:
    code = f"{statement}\nimport sys\nprint(*[n for n in {names!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("folder", "foreign"),
    [("node/daemon", "torch"), ("node/trainer", "aiohttp"), ("node/ipc", "aiohttp"), ("node/ipc", "torch")],
)
def test_a_process_does_not_import_what_is_the_others(folder, foreign):
    """The folder of a file says in which process it runs: the daemon has the network, the trainer torch."""
    found = [
        f"{path} line {line}: imports {name}"
        for path, text, package in _each(folder)
        for line, name in _imports(ast.parse(text), package)
        if _within(name, (foreign,))
    ]
    assert not found, "\n".join(found)


def test_the_daemon_does_not_load_torch(tmp_path):
    """It must start in well under a second, and never share a process with the trainer."""
    assert _loaded_by("import gossamer.node.daemon.daemon", ("torch", "transformers"), tmp_path) == []


def test_protocol_loads_no_event_loop_and_no_torch(tmp_path):
    """Not even by way of another package."""
    modules = map(_module, _sources("protocol"))
    names = ("torch", "aiohttp", *(f"gossamer.{room}" for room in ROOMS if room != "protocol"))
    assert _loaded_by(f"import {', '.join(modules)}", names, tmp_path) == []


# --- what stays out of the files ------------------------------------------------------------------

# Where packages come from is the user's choice (pip's own configuration).
REGISTRIES = re.compile(r"py[p]i\.(?:org|io)|python[h]osted\.org|download\.py[t]orch\.org|registry\.np[m]js")
STANDARD_TOPS = frozenset(
    {"Applications", "Library", "Users", "Volumes", "app", "builds", "home", "mnt", "opt", "private"}
    | {"root", "run", "src", "srv", "tmp", "usr", "var"}
)


def _own_paths() -> re.Pattern[str]:
    """Absolute paths that only this checkout's machine has."""
    own = {str(ROOT), str(Path.home())} - {f"/{top}" for top in STANDARD_TOPS}
    if len(ROOT.parts) > 2 and ROOT.parts[1] not in STANDARD_TOPS:
        own.add(f"/{ROOT.parts[1]}")
    if not own:  # a container's /src and /root, which are any machine's
        return re.compile(r"(?!)")
    return re.compile(r"(?<![\w.}~-])(?:" + "|".join(map(re.escape, sorted(own))) + r")(?![\w.-])")


def test_no_file_names_this_machine_or_a_registry():
    own, found = _own_paths(), []
    for name in _tracked_or_new():
        data = (ROOT / name).read_bytes()
        if b"\0" in data[:8192]:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            # A unit file or an image may well use the very folder that somebody has checked out to.
            if REGISTRIES.search(line) or (not name.startswith("deploy/") and own.search(line)):
                found.append(f"{name}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)

"""What is shipped: nothing is lost through the links, and importing it stays light."""

import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parent.parent
LINKED = ("storage", "engine_plugins")  # installed as kvpool.storage, kvpool.engine_plugins


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what goes into a distribution, which nobody edits meanwhile."""
    pyproject = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text())
    shipped = pyproject["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    copy = tmp_path_factory.mktemp("checkout")
    for name in [*shipped, *LINKED, ".gitignore"]:
        source = REPO_ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, symlinks=True, ignore=ignored)
        elif source.exists():
            shutil.copy(source, copy / name)
    return copy


def build(source: Path, kind: str, out: Path) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_from_sdist(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return build(source, "wheel", tmp_path_factory.mktemp("wheel-from-sdist"))


def package_files(checkout: Path) -> set[str]:
    """Where every file of the package must be found, told by the folders and not by the links."""
    package = checkout / "kvpool"
    files = {
        path.relative_to(checkout)
        for path in package.rglob("*")
        if path.is_file() and not any(path.is_relative_to(package / name) for name in LINKED)
    }
    for name in LINKED:
        folder = checkout / name
        files |= {
            Path("kvpool") / path.relative_to(checkout)
            for path in folder.rglob("*")
            if path.is_file()
        }
    return {path.as_posix() for path in files}


def wheel_members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_every_file_once(checkout: Path, wheel: Path) -> None:
    members = {name for name in wheel_members(wheel) if ".dist-info/" not in name}
    expected = package_files(checkout)
    assert "kvpool/py.typed" in expected
    assert any(name.startswith("kvpool/storage/") for name in expected)
    assert any(name.startswith("kvpool/engine_plugins/") for name in expected)
    assert members == expected


def test_the_wheel_from_the_sdist_is_the_same(wheel: Path, wheel_from_sdist: Path) -> None:
    assert wheel_members(wheel_from_sdist) == wheel_members(wheel)


def test_the_sdist_holds_what_the_tests_need(checkout: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    tests = {p.relative_to(checkout).as_posix() for p in (checkout / "tests").rglob("*.py")}
    assert {*package_files(checkout), *tests, "Makefile", "pyproject.toml"} <= members


def modules_after(statement: str) -> set[str]:
    """The names of what a fresh interpreter has loaded once it has run `statement`."""
    code = f"import json, sys; {statement}; print(json.dumps(list(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("kvpool", {"asyncio", "msgspec", "numpy", "rich", "torch", "typer", "uvloop", "vllm"}),
        # An engine imports this one: no event loop and no network library may come with it.
        ("kvpool.client", {"aiohttp", "asyncio", "grpc", "torch", "typer", "uvloop", "vllm"}),
    ],
)
def test_importing_is_light(module: str, unwanted: set[str]) -> None:
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert not loaded & unwanted

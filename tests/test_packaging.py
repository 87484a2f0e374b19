"""What is shipped: nothing is lost through the links, and importing it stays light."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.imports import modules_after

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


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("kvpool", {"asyncio", "msgspec", "numpy", "rich", "torch", "typer", "uvloop", "vllm"}),
        # An engine imports this one: no event loop and no network library may come with it.
        ("kvpool.client", {"aiohttp", "asyncio", "grpc", "torch", "typer", "uvloop", "vllm"}),
        # A daemon starts several of these, and again whenever one ends.
        ("kvpool.daemon.workers.transfer_worker", {"asyncio", "importlib.metadata", "numpy"}),
        ("kvpool.transfer.tcp", {"asyncio", "importlib.metadata", "numpy"}),
    ],
)
def test_importing_is_light(module: str, unwanted: set[str]) -> None:
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert not loaded & unwanted


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_environments_install_pinned_versions() -> None:
    """Of all that the development environment and the image ask for (`scripts/constraints`)."""
    project = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(one for name in extras if name != "nixl" for one in extras[name]),
    ]
    names = {canonical(re.match(r"[\w.-]+", one)[0]) for one in wanted}
    lines = (REPO_ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    pinned = {canonical(line.partition("==")[0]) for line in lines if "==" in line}
    assert names - {"kvpool"} <= pinned
    assert not [line for line in lines if line and "==" not in line and not line.startswith("#")]


def test_what_needs_torch_runs_where_it_is() -> None:
    """`scripts/test` looks for the marker; without it, such a test is skipped everywhere."""
    for path in (REPO_ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        needs = re.search(r"""(importorskip|find_spec)\(["']torch["']""", text)
        if needs and "vllm" not in path.parts:
            assert "pytest.mark.torch" in text, path


def test_the_changelog_can_be_made_of_the_fragments() -> None:
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9"]
    result = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    fragments = [path for path in (REPO_ROOT / "changes").glob("*.md") if path.name != "README.md"]
    kinds = {path.suffixes[0].strip(".") for path in fragments}
    assert kinds <= {"breaking", "feature", "fix", "internal"}
    for path in fragments:
        assert path.read_text().strip().splitlines()[0][:60] in result.stdout, path.name


def test_the_install_is_as_small_as_the_readme_says() -> None:
    """The packages that `pip install .` brings, counted from what is installed here."""
    closure = installed_closure("kvpool")
    said = re.search(r"(\d+) packages, (\d+) MB", (REPO_ROOT / "README.md").read_text())
    assert said is not None, "the README says how many packages, and how many MB"
    assert len(closure) == int(said[1]), sorted(closure)
    megabytes = sum(bytes_of(name) for name in closure) / 1e6
    assert megabytes == pytest.approx(int(said[2]), rel=0.25)


def installed_closure(root: str) -> set[str]:
    """The distributions that one needs without extras, itself left out."""
    found: set[str] = set()
    left = [root]
    while left:
        for line in metadata.requires(left.pop()) or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                name = canonical(need.name)
                if name not in found:
                    found.add(name)
                    left.append(name)
    return found


def bytes_of(name: str) -> int:
    """What its files take, without what Python compiles of them."""
    files = metadata.files(name) or []
    paths = [Path(str(file.locate())) for file in files if file.suffix != ".pyc"]
    return sum(path.stat().st_size for path in paths if path.is_file())

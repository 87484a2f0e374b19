"""What the documents say is so: targets, links and code.

Their Python is run by `tests/integration/test_document_programs.py`, the commands of the README, the quick start and the
runbook by `tests/integration/test_walk.py`, what they say to vLLM by `tests/integration/vllm/test_quickstart.py`.
"""

import importlib.util
import json
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main

from kvpool.admin.tokens import read_tokens
from kvpool.cli import verbs
from kvpool.config import SECRETS, SETTINGS, load, parse_setting
from kvpool.engine_plugins import sglang
from kvpool.engine_plugins.sglang.config import BackendConfig
from kvpool.engine_plugins.vllm import NAME
from kvpool.engine_plugins.vllm.chunks.config import TierConfig
from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.following import following
from kvpool.engine_plugins.vllm.scheduler.session_turns import session_turn
from kvpool.errors import ConfigError
from kvpool.router.config import SETTINGS as ROUTER_SETTINGS
from kvpool.router.config import load as load_router

REPO_ROOT = Path(__file__).resolve().parent.parent

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # which typer does not export


def _documents() -> ModuleType:
    spec = importlib.util.spec_from_file_location("documents", REPO_ROOT / "tests/documents.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


DOCS: Any = _documents()
DOCUMENTS = DOCS.DOCUMENTS
PRESENT = [path for path in DOCUMENTS if path.parent.name != "changes"]  # not of the past
SECRET = "0123456789abcdef0123456789abcdef"

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO_ROOT))
)
each_present = pytest.mark.parametrize(
    "document", PRESENT, ids=lambda path: str(path.relative_to(REPO_ROOT))
)

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def blocks_in(document: Path, language: str) -> list[Any]:
    return [block for block in DOCS.blocks(document) if block.language == language]


def commands_in(document: Path) -> Iterator[tuple[str, list[str]]]:
    """The words of each program that its console blocks run, and where."""
    for command in DOCS.all_commands([document]):
        for words in command.simple():
            yield command.where, words


# ---- targets and links ---------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    headings = HEADING.findall(DOCS.prose(text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


FILLED = runpy.run_path(str(REPO_ROOT / "scripts" / "reference.py"))["filled"]
"""Puts what the code declares into a document."""


def make_targets() -> set[str]:
    makefile = (REPO_ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def targets_mentioned(document: Path) -> set[str]:
    spans = DOCS.CODE_SPAN.findall(DOCS.prose(document.read_text()))
    matches = [re.match(r"make ([a-z][a-z-]*)", span) for span in spans]
    found = {match[1] for match in matches if match}
    return found | {words[1] for _, words in commands_in(document) if words[0] == "make"}


def test_every_make_target_is_among_the_words_for_contributors() -> None:
    assert make_targets() <= targets_mentioned(REPO_ROOT / "CONTRIBUTING.md")


def test_every_make_target_says_what_it_does() -> None:
    makefile = (REPO_ROOT / "Makefile").read_text()
    described = set(re.findall(r"^([a-z][a-z-]*):.* ## \S", makefile, re.MULTILINE))
    assert described == make_targets()


@each_document
def test_mentioned_make_targets_exist(document: Path) -> None:
    assert targets_mentioned(document) <= make_targets()


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in LINK.findall(DOCS.prose(document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(FILLED(target.read_text()))):
            broken.append(link)
    assert not broken


def test_a_decision_record_has_at_most_150_words() -> None:
    records = sorted((REPO_ROOT / "docs" / "decisions").glob("0*.md"))
    assert records, "this looks in the wrong place for decision records"
    lengths = {path.name: len(path.read_text().split()) for path in records}
    assert not {name: words for name, words in lengths.items() if words > 150}


# ---- commands ------------------------------------------------------------------------------------


class WrongCommand(Exception):
    """kind: the name of the error's class in typer's parser."""

    def __init__(self, where: str, words: list[str], error: Exception) -> None:
        super().__init__(f"{where}: kvpool {' '.join(words)}: {error}")
        self.kind = type(error).__name__


@cache
def program() -> Any:
    return typer.main.get_command(verbs.app)


def parse(where: str, words: list[str]) -> tuple[str, dict[str, Any]]:
    """The verb and its parameters, by the command line's own parser. Nothing is run."""
    command, name, context, rest = program(), "kvpool", None, words
    try:
        while True:
            context = command.make_context(name, list(rest), parent=context)
            if not hasattr(command, "resolve_command"):
                return name, context.params
            rest = [*context._protected_args, *context.args]
            name, command, rest = command.resolve_command(context, rest)
    except USAGE_ERROR as error:
        raise WrongCommand(where, words, error) from None


def stand_ins(folder: Path, text: str) -> str:
    """Files of ours in place of those that a file of settings names."""

    def stand_in(match: re.Match[str]) -> str:
        path = folder / Path(match[3]).name
        path.write_text(f"{Path(match[3]).name.replace('.', '-')}-{SECRET}\n")
        path.chmod(0o600)
        return f'{match[1]}"{path}"'

    return re.sub(
        r'^((\w+_(?:file|ca|cert|key|crl|tokens)) = )"(/[^"]+)"', stand_in, text, flags=re.MULTILINE
    )


def check_values(verb: str, given: dict[str, Any], folder: Path, *, whole: bool) -> None:
    """What `serve` and `router` are given is taken by those that read it. whole: nothing is left out."""
    known = {"serve": SETTINGS, "router": ROUTER_SETTINGS}.get(verb, ())
    flags = {name: value for name, value in given.items() if name in known and value}
    for name in flags:
        if name.startswith("tls_") or name in {"http_tokens", "token_file"}:
            file = folder / name
            file.write_text(SECRET)
            file.chmod(0o600)
            flags[name] = str(file)
    if verb == "router":
        load_router(flags=flags, environ={"KVPOOL_ROUTER_TOKEN": SECRET})
    elif whole:
        load(flags=flags, environ={})
    else:
        for name, value in flags.items():
            parse_setting(name, value)


@each_present
def test_command_lines_of_kvpool_are_right(document: Path, tmp_path: Path) -> None:
    for where, words in commands_in(document):
        arguments = DOCS.kvpool_arguments(words)
        if arguments is None:
            continue
        verb, given = parse(where, [word for word in arguments if word != "..."])
        try:
            check_values(verb, given, tmp_path, whole="..." not in arguments)
        except ConfigError as error:
            raise AssertionError(f"{where}: kvpool {' '.join(arguments)}: {error}") from None


@each_present
def test_mentioned_verbs_and_options_exist(document: Path) -> None:
    """In the text a command may lack what it takes, `kvpool drain`, or show how it is written."""
    for span in DOCS.CODE_SPAN.findall(DOCS.prose(document.read_text())):
        if not re.match(r"kvpool [a-z]", span):
            continue
        for words in DOCS.simple_commands(span.replace("\\|", " ")):
            arguments = DOCS.kvpool_arguments(words)
            if arguments is None or arguments[:1] == ["VERB"]:
                continue
            try:
                parse(str(document.relative_to(REPO_ROOT)), arguments)
            except WrongCommand as error:
                if error.kind == "NoSuchOption" or "No such command" in str(error):
                    raise


@pytest.mark.parametrize(
    "wrong",
    [
        "kvpool sevre",
        "kvpool serve --memroy 1GiB",
        "kvpool job stopp evict-1",
        "kvpool blocks locate",
        "kvpool drain a b c",
        "kvpool top --once=2",
        "kvpool plan --rate many",
    ],
)
def test_the_check_of_command_lines_sees_what_is_wrong(wrong: str) -> None:
    (words,) = DOCS.simple_commands(wrong)
    with pytest.raises(WrongCommand):
        parse("here", words[1:])


@pytest.mark.parametrize(
    "wrong",
    [
        "kvpool serve --memory plenty",
        "kvpool serve --listen 10.0.0.5:7070",
        "kvpool serve --join etcd://10.0.0.2:2379",
        "kvpool serve --http 0.0.0.0:7071",
        "kvpool router --engine http://127.0.0.1:8000,roll=decode",
        "kvpool router --policy best",
    ],
)
def test_the_check_of_values_sees_what_is_wrong(wrong: str, tmp_path: Path) -> None:
    (words,) = DOCS.simple_commands(wrong)
    verb, given = parse("here", words[1:])
    with pytest.raises(ConfigError):
        check_values(verb, given, tmp_path, whole=True)


@each_present
def test_a_command_is_shown_as_one(document: Path) -> None:
    """After a `$`, in a console block: else nobody has looked at it."""
    verbs = "|".join(program().commands)
    command = re.compile(rf"(\$ |(kvpool ({verbs})|vllm serve|make|pip install)\b)")
    for block in DOCS.blocks(document):
        lines = {"": block.text.splitlines(), "console": []}.get(block.language, [])
        if block.language == "console":
            lines = DOCS.printed(block)
        assert not [line for line in lines if command.match(line)], block.where


@each_present
def test_variables_and_extras_exist(document: Path) -> None:
    text = document.read_text()
    named = set(re.findall(r"\bKVPOOL_[A-Z0-9_]*[A-Z0-9]\b", text))
    assert not named - known_variables()
    for extras in re.findall(r"pip install (?:--\S+ )?'(?:kvpool|\.)\[([\w,-]+)\]'", text):
        assert set(extras.split(",")) <= set(project()["optional-dependencies"]), extras


def installed(text: str) -> list[str]:
    """What commands of pip in a text would take from the Python Package Index under this project's name."""
    named = r"\bpip3? install (?:-[-\w]+ )*['\"]?kvpool\b(?! @)[^\s`]*"
    return re.findall(named, text)


def test_nothing_is_installed_by_a_name_that_is_not_ours() -> None:
    """It is not on the Python Package Index yet (docs/release.md): the name is anybody's until then."""
    assert installed("pip install kvpool, pip install -U 'kvpool[admin]'")
    assert not installed("pip install '.[admin]', pip install 'kvpool @ git+https://host/kvpool'")
    pages = [*REPO_ROOT.glob("*.md"), *(REPO_ROOT / "docs").rglob("*.md")]
    pages += [each for each in (REPO_ROOT / "deploy").rglob("*") if each.is_file()]
    code = [*(REPO_ROOT / "kvpool").rglob("*.py"), *(REPO_ROOT / "storage").rglob("*.py")]
    code += (REPO_ROOT / "engine_plugins").rglob("*.py")
    found = {
        str(path.relative_to(REPO_ROOT)): lines
        for path in [*pages, *code]
        if path.name != "release.md" and (lines := installed(path.read_text(errors="replace")))
    }
    assert not found


@cache
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text())["project"]
    return found


@cache
def known_variables() -> frozenset[str]:
    """Those of settings, those of secrets in files, and those that stand in what reads them."""
    sources = [*(REPO_ROOT / "kvpool").rglob("*.py"), *(REPO_ROOT / "engine_plugins").rglob("*.py")]
    sources.append(REPO_ROOT / "tests" / "conftest.py")
    sources += (REPO_ROOT / "deploy").glob("*.yaml")
    text = "\n".join(path.read_text() for path in sources)
    found = {f"KVPOOL_{name.upper()}" for name in SETTINGS}
    found |= set(re.findall(r"\bKVPOOL_[A-Z0-9_]*[A-Z0-9]\b", text))
    secrets = {*SECRETS, "engine_api_key", "token"}
    return frozenset(found | {f"KVPOOL_{name.upper()}_FILE" for name in secrets})


# ---- what engines are given ----------------------------------------------------------------------


TIER_MODULE = "kvpool.engine_plugins.vllm.tier"
VLLMS_OWN = {"MooncakeStoreConnector"}
"""Connectors of vLLM's that kvpool serves."""


def check_transfer(text: str) -> None:
    """Raises `ConfigError`, `ValueError` or `AssertionError` for what the plugin, or vLLM, would not take."""
    given = json.loads(text)
    if given["kv_connector"] == "OffloadingConnector":
        tiers = given["kv_connector_extra_config"]["secondary_tiers"]
        for tier in tiers:
            assert (tier.pop("type"), tier.pop("module_path")) == ("KvpoolTier", TIER_MODULE)
            TierConfig.from_given(tier)
        return
    assert given["kv_connector"] in {NAME, *VLLMS_OWN}
    assert given["kv_role"] in {"kv_producer", "kv_consumer", "kv_both"}
    assert given["kv_load_failure_policy"] == "recompute"  # what docs/vllm.md asks for
    if given["kv_connector"] == NAME:
        PluginConfig.from_given(given.get("kv_connector_extra_config"))


@each_present
def test_engines_are_given_what_the_plugin_takes(document: Path) -> None:
    for where, words in commands_in(document):
        if words[0] != "vllm":
            continue
        transfer = DOCS.option(words, "--kv-transfer-config")
        events = DOCS.option(words, "--kv-events-config")
        try:
            if transfer is not None:
                check_transfer(transfer)
            if events is not None:
                assert json.loads(events)["publisher"] == "zmq"
        except (AssertionError, ConfigError, ValueError) as error:
            raise AssertionError(f"{where}: {error}") from None


@each_present
def test_sglang_is_given_what_the_backend_takes(document: Path) -> None:
    for where, words in commands_in(document):
        extra = DOCS.option(words, "--hicache-storage-backend-extra-config")
        if extra is None:
            continue
        assert DOCS.option(words, "--hicache-storage-backend") == "dynamic", where
        given = json.loads(extra)
        assert given["class_name"] == sglang.CLASS and given["module_path"] == sglang.__name__, (
            where
        )
        assert BackendConfig.from_given(given).interface_v1, where


def test_the_check_of_engines_sees_what_is_wrong() -> None:
    right = {
        "kv_connector": NAME,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": "/run/kvpool/kvpool.sock"},
    }
    check_transfer(json.dumps(right))
    with pytest.raises(ConfigError):
        check_transfer(json.dumps(right | {"kv_connector_extra_config": {"sockets": "/run"}}))
    with pytest.raises(ValueError, match="Expecting"):
        check_transfer(json.dumps(right)[:-1])


@each_present
def test_json_is_json(document: Path) -> None:
    for block in blocks_in(document, "json"):
        found = json.loads(block.text)
        if "kv_transfer_params" in found:
            params = found["kv_transfer_params"]
            said = following(params) or session_turn(params)
            assert said is not None, block.where


# ---- files and programs --------------------------------------------------------------------------


def check_toml(text: str, folder: Path) -> None:
    """By whoever reads such a file, which its tables tell. Raises `ConfigError`."""
    file = folder / "settings.toml"
    file.write_text(stand_ins(folder, text))
    file.chmod(0o600)
    tables = tomllib.loads(text)
    if "token" in tables:
        assert read_tokens(file)
    elif {"engines", "isolate", "models"} & tables.keys():
        load_router(file=str(file), environ={})
    elif "project" in tables:
        assert tables["project"].keys() == {"entry-points"}, "of a package that extends kvpool"
    else:
        load(file=str(file), environ={})


@each_present
def test_files_of_settings_are_taken(document: Path, tmp_path: Path) -> None:
    for block in blocks_in(document, "toml"):
        try:
            check_toml(block.text, tmp_path)
        except ConfigError as error:
            raise AssertionError(f"{block.where}: {error}") from None


@pytest.mark.parametrize(
    "wrong",
    [
        'memroy = "1GiB"\n',
        'listen = "127.0.0.1:8080"\n[[engines]]\nurl = "http://127.0.0.1:8000"\nrole = "cook"\n',
        '[[token]]\nname = "ci"\nsha256 = "ab"\nrole = "viewer"\ntenants = ["*"]\n',
    ],
    ids=["daemon", "router", "tokens"],
)
def test_the_check_of_files_sees_what_is_wrong(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        check_toml(wrong, tmp_path)


@each_document
def test_python_blocks_compile(document: Path) -> None:
    for block in blocks_in(document, "python"):
        # Blank lines in front, so that a syntax error names the document's own line.
        compile("\n" * (block.line - 1) + block.text, str(document), "exec")


def test_the_tests_that_show_what_stops_an_attacker_are_there(repo_root: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (repo_root / "SECURITY.md").read_text())
    assert len(named) > 20
    for file, name in named:
        text = (repo_root / file).read_text()
        assert not name or re.search(rf"^\s*(async )?def {name}\(", text, re.MULTILINE), (
            file,
            name,
        )

"""What deploy/ holds, against what it speaks of: metrics, settings, commands, sections, files."""

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import promql_parser as promql
import pytest
import typer.main
import yaml

from kvpool.cli import verbs
from kvpool.config import SECRETS, SETTINGS, load
from kvpool.errors import ConfigError
from kvpool.router.config import SETTINGS as ROUTER_SETTINGS
from kvpool.router.config import EngineTable
from kvpool.router.config import load as load_router
from kvpool.router.records.metrics import BREAKER_STATES, OUTCOMES, Metrics
from kvpool.telemetry import cluster_stats, memory_stats, tier_stats
from kvpool.telemetry.metrics import families
from kvpool.telemetry.misses import Reason
from kvpool.telemetry.node_stats import NodeStats
from tests.support.servers.find import find_server

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "kvpool"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
BOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
DROP_INS = sorted((DEPLOY / "systemd" / "kvpool.service.d").glob("*.conf"))
OPERATIONS = ROOT / "docs" / "operations.md"
EXPOSURE_MAX = 2.0  # of systemd-analyze security: 10 is bare, below 2.5 it says OK
# What Prometheus adds to all that it scrapes.
SCRAPED = {"instance", "job"}


# ---- all files -------------------------------------------------------------------------------------------


def yaml_files() -> list[Path]:
    found = [*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")]
    return sorted(path for path in found if "templates" not in path.parts)


@pytest.mark.parametrize("path", yaml_files(), ids=lambda path: path.name)
def test_yaml_parses(path: Path) -> None:
    assert list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.json")), ids=lambda path: path.name)
def test_json_parses(path: Path) -> None:
    assert json.loads(path.read_text())


def test_the_index_names_every_file() -> None:
    index = (DEPLOY / "README.md").read_text()
    names = {path.name for path in DEPLOY.iterdir()} - {"README.md", ".gitignore", "secrets"}
    assert {name for name in names if name not in index} == set()


# ---- queries: dashboards and rules --------------------------------------------------------------------------


def known_metrics() -> dict[str, set[str]]:
    """Labels by the names of series, as Prometheus has them."""
    known = {"up": set(SCRAPED)}

    def add(name: str, kind: str, labels: set[str]) -> None:
        if kind == "histogram":
            known[f"{name}_bucket"] = labels | SCRAPED | {"le"}
            known[f"{name}_sum"] = known[f"{name}_count"] = labels | SCRAPED
        else:
            known[name] = labels | SCRAPED

    for metric in families(NodeStats).values():
        add(metric.name, metric.kind, set(metric.labels))
    for value in vars(Metrics()).values():
        if hasattr(value, "_labelnames"):
            (family,) = value.describe()
            suffix = "_total" if family.type == "counter" else ""
            add(family.name + suffix, family.type, set(value._labelnames))
    return known


KNOWN = known_metrics()
# Labels whose values are words of ours; None of a metric: of all that have the label.
WORDS: dict[tuple[str | None, str], set[str]] = {
    (None, "result"): set(memory_stats.RESULTS),
    (None, "standing"): set(cluster_stats.STANDINGS),
    (None, "phase"): set(cluster_stats.DRAIN_PHASES),
    ("kvpool_load_parts_total", "outcome"): set(memory_stats.OUTCOMES),
    ("kvpool_peer_pull_parts_total", "outcome"): set(memory_stats.OUTCOMES),
    ("kvpool_router_requests_total", "outcome"): set(OUTCOMES),
    ("kvpool_node_state", "state"): set(cluster_stats.NODE_STATES),
    ("kvpool_tier_state", "state"): set(tier_stats.PLACE_STATES),
    ("kvpool_engines", "state"): {"connected", "not_connected"},
    ("kvpool_router_engine_breaker", "state"): {state.value for state in BREAKER_STATES},
    (None, "tier"): {"dram", "ssd", "device", "remote", "peer", "gpu"},
}


def labels_of(expr: Any) -> set[str]:
    """The labels that the result of an expression may have. Fails for what no daemon or router tells."""
    match expr:
        case promql.VectorSelector():
            assert expr.name in KNOWN, f"there is no metric {expr.name}"
            labels = KNOWN[expr.name]
            for matcher in expr.matchers.matchers:
                assert matcher.name in labels, f"{expr.name} has no label {matcher.name}"
                check_value(expr.name, matcher.name, matcher.value)
            return labels
        case promql.MatrixSelector():
            return labels_of(expr.vector_selector)
        case promql.SubqueryExpr() | promql.ParenExpr() | promql.UnaryExpr():
            return labels_of(expr.expr)
        case promql.NumberLiteral() | promql.StringLiteral():
            return set()
        case promql.Call():
            labels = set().union(*(labels_of(each) for each in expr.args))
            if expr.func.name == "histogram_quantile":
                assert "le" in labels, "histogram_quantile of what has no buckets"
                labels = labels - {"le"}
            return labels
        case promql.AggregateExpr():
            inner = labels_of(expr.expr)
            if expr.modifier is None:
                return inner if "topk" in str(expr.prettify()) else set()
            named = set(expr.modifier.labels)
            assert named <= inner, f"by {named - inner}: not there"
            return named if expr.modifier.type == promql.AggModifierType.By else inner - named
        case promql.BinaryExpr():
            left, right = labels_of(expr.lhs), labels_of(expr.rhs)
            if expr.modifier is not None and expr.modifier.matching is not None:
                named = set(expr.modifier.matching.labels)
                assert named <= left and named <= right, f"on {named}: not on both sides"
            return left or right
    raise AssertionError(f"what is {type(expr).__name__}?")


def check_value(metric: str, label: str, value: str) -> None:
    words = WORDS.get((metric, label)) or WORDS.get((None, label))
    if words is not None and "$" not in value:
        unknown = set(value.split("|")) - words
        assert not unknown, f"{metric}: {label} is never {unknown}"


def queries() -> Iterator[tuple[str, str, str]]:
    """Where, the query, and all texts that name labels of its result."""
    for path in BOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                expr = target["expr"].replace("$__rate_interval", "5m")
                yield f"{path.stem}: {panel['title']}", expr, target["legendFormat"]
    for rule in alerts():
        yield rule["alert"], rule["expr"], " ".join(rule["annotations"].values())


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize(("where", "expr", "texts"), list(queries()))
def test_queries_name_what_exists(where: str, expr: str, texts: str) -> None:
    labels = labels_of(promql.parse(expr))
    named = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", texts))
    named |= set(re.findall(r"\$labels\.(\w+)", texts))
    assert named <= labels, f"{where}: {named - labels} is no label of the result"


def test_the_check_of_queries_sees_what_is_wrong() -> None:
    for wrong in (
        "kvpool_no_such_metric",
        'kvpool_leases{tenant="a"}',
        'kvpool_node_state{state="srving"}',
        "sum by (tenant) (kvpool_leases)",
        "histogram_quantile(0.9, rate(kvpool_fetch_wait_seconds_sum[5m]))",
        "kvpool_fetch_wait_seconds",
        "kvpool_router_requests",
        "kvpool_leases and on (peer) kvpool_clients",
    ):
        with pytest.raises(AssertionError):
            labels_of(promql.parse(wrong))


def test_variables_of_dashboards() -> None:
    for path in BOARDS:
        board = json.loads(path.read_text())
        names = {variable["name"] for variable in board["templating"]["list"]}
        used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(board["panels"]))) - {"__rate_interval"}
        assert used <= names, f"{path.name} uses {used - names}"
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                match = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
                assert match and match[2] in KNOWN[match[1]]


def test_panels_have_ids_and_places_of_their_own() -> None:
    for path in BOARDS:
        board = json.loads(path.read_text())
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        taken: dict[tuple[int, int], str] = {}
        for panel in board["panels"]:
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= 24
            for x in range(at["x"], at["x"] + at["w"]):
                for y in range(at["y"], at["y"] + at["h"]):
                    other = taken.setdefault((x, y), panel["title"])
                    assert other == panel["title"], f"{path.name}: {panel['title']} covers {other}"


def test_dashboards_have_uids_of_their_own() -> None:
    uids = [json.loads(path.read_text())["uid"] for path in BOARDS]
    assert len(set(uids)) == len(uids) == 3


# ---- alerts and their runbook -------------------------------------------------------------------------------


def sections() -> dict[str, str]:
    """Of the runbook, each with its text."""
    parts = re.split(r"^### (.+)$", OPERATIONS.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    named = {name for name in sections() if name.startswith("Kvpool")}
    assert named == {rule["alert"] for rule in alerts()}


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_there_is_to_know(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule["annotations"]["summary"] and rule["annotations"]["description"]
    name = rule["alert"]
    assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"
    section = sections()[name]
    for word in ("**Meaning.**", "**Look.**", "**Do.**"):
        assert word in section, f"{name}: its section lacks {word}"


def commands() -> set[str]:
    group: Any = typer.main.get_command(verbs.app)
    return set(group.commands)


def test_commands_in_the_runbook_exist() -> None:
    text = OPERATIONS.read_text() + (DEPLOY / "README.md").read_text()
    named = set(re.findall(r"`(?:\S+/)?kvpool ([a-z]+)", text))
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        named |= set(
            re.findall(r"^\$ (?:docker exec kvpool )?kvpool ([a-z]+)", block, re.MULTILINE)
        )
        named |= set(re.findall(r"^    kvpool ([a-z]+)", block, re.MULTILINE))
    assert {"drain", "nodes", "plan", "serve"} <= named, "is this test still right?"
    assert named <= commands(), f"no such commands: {named - commands()}"


def test_names_in_the_runbook_exist() -> None:
    named = set(re.findall(r"`([a-z]+_[a-z_]+)(?: = [^`]*|\{[^`]*\})?`", OPERATIONS.read_text()))
    numbers = {name for name in named if name.startswith("kvpool_")}
    assert numbers <= {name.removesuffix("_bucket") for name in KNOWN}
    of_engines = {field.name for field in msgspec.structs.fields(EngineTable)}
    of_plugins = {"load_mode"}
    settings = {*SETTINGS, *ROUTER_SETTINGS, *of_engines, *of_plugins}
    assert named - numbers <= settings | set(OUTCOMES) | set(Reason), named - numbers - settings


@pytest.fixture(scope="module")
def promtool() -> str:
    try:
        return find_server("promtool")
    except ConfigError as error:
        pytest.skip(str(error))


def test_promtool_takes_rules_and_configuration(promtool: str, tmp_path: Path) -> None:
    shutil.copy(ALERTS, tmp_path)
    # It looks for the files with tokens, which are another machine's.
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    for path in set(re.findall(r"_file: (\S+)", text)):
        stand_in = tmp_path / Path(path).name
        stand_in.touch()
        text = text.replace(path, str(stand_in))
    (tmp_path / "prometheus.yml").write_text(text)
    checks = (
        ["check", "rules", "alerts.yaml"],
        ["check", "config", "--syntax-only", "prometheus.yml"],
    )
    for words in checks:
        done = subprocess.run(
            [promtool, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should_and_only_then(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "test", "rules", str(Path(__file__).parent / "deploy_alerts.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_can_work_out_every_query(promtool: str, tmp_path: Path) -> None:
    """Some are wrong only when there is more than one series: which one belongs to which."""
    series = []
    for name, labels in KNOWN.items():
        own = sorted(labels - {"instance", "job", "le"})
        for instance in ("a", "b"):
            for end in ("0.1", "+Inf") if "le" in labels else ("",):
                for which in ("x", "y") if own else ("x",):
                    pairs = [f'{label}="{which}"' for label in own] + [f'instance="{instance}"']
                    pairs += [f'le="{end}"'] if end else []
                    series.append({"series": f"{name}{{{','.join(pairs)}}}", "values": "0+1x20"})
    asked = [expr for _, expr, _ in queries()]
    test = {
        "input_series": series,
        "interval": "1m",
        "promql_expr_test": [{"expr": each, "eval_time": "20m"} for each in asked],
    }
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run(
        [promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    # What comes out is not what is looked at: nothing was expected of any.
    assert "got:" in said, said
    errors = [line for line in said.splitlines() if "err:" in line]
    assert not errors


# ---- the image ----------------------------------------------------------------------------------------------


def docker_instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text()
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def test_the_images_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = [
        rest.removeprefix("EXTRAS=").split(",")
        for word, rest in docker_instructions()
        if word == "ARG" and rest.startswith("EXTRAS=")
    ]
    assert set(extras) <= set(project["optional-dependencies"])
    assert "cluster" in extras


def test_the_image_begins_from_a_digest_and_says_what_is_in_it() -> None:
    instructions = docker_instructions()
    (base,) = [
        rest.removeprefix("BASE=")
        for word, rest in instructions
        if word == "ARG" and rest.startswith("BASE=")
    ]
    assert re.fullmatch(r"[a-z0-9./-]+:[\w.-]+@sha256:[0-9a-f]{64}", base)
    assert {rest.split()[0] for word, rest in instructions if word == "FROM"} == {"${BASE}"}
    (bill,) = [rest for word, rest in instructions if word == "RUN" and "cyclonedx-py" in rest]
    assert "/opt/kvpool/share/kvpool/sbom.cdx.json /opt/kvpool/bin/python" in bill
    lock = (DEPLOY / "requirements-sbom.lock").read_text().splitlines()
    pinned = [line for line in lock if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pinned)
    assert any(line.startswith("cyclonedx-bom==") for line in pinned)


def test_the_image_is_run_by_nobody_special_and_checks_itself() -> None:
    last = docker_instructions()
    last = last[max(at for at, (word, _) in enumerate(last) if word == "FROM") :]
    by_word = dict(last)
    assert re.fullmatch(r"(\d+):\1", by_word["USER"]) and by_word["USER"] != "0:0"
    assert json.loads(by_word["ENTRYPOINT"]) == ["kvpool"]
    check = by_word["HEALTHCHECK"]
    assert json.loads(check[check.index("CMD") + 4 :]) == ["kvpool", "status", "--quiet"]
    assert set(by_word["EXPOSE"].split()) == {"7070", "7071", "8080"}


def test_what_the_image_is_built_from_is_there_and_let_through() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored, "nothing goes into the build unless it is named"
    sources = [
        source
        for word, rest in docker_instructions()
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored
    # What hatchling needs of the checkout to build the wheel, links included.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"], "pyproject.toml"} <= set(sources)
    links = {os.readlink(path) for path in (ROOT / "kvpool").iterdir() if path.is_symlink()}
    assert {link.removeprefix("../") for link in links} <= set(sources)


# ---- compose ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_what_services_refer_to_is_declared(compose: dict[str, Any]) -> None:
    used: dict[str, set[str]] = {"volumes": set(), "secrets": set(), "networks": set()}
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                used["volumes"].add(source)
        used["secrets"] |= set(service.get("secrets", []))
        used["networks"] |= set(service.get("networks", []))
        assert ("networks" in service) != (service.get("network_mode") == "none"), name
        for other, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                checked = compose["services"][other]
                assert "healthcheck" in checked, f"{name} waits for {other}, which has no check"
    for kind, names in used.items():
        assert names == set(compose[kind]), kind


def test_secrets_reach_services_as_files_alone(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for name, value in service.get("environment", {}).items():
            setting = name.removeprefix("KVPOOL_").removesuffix("_FILE").lower()
            if setting in {*SECRETS, "router_token"} and setting != "directory":
                assert name.endswith("_FILE")
                assert Path(value).name in service["secrets"]
        for path in re.findall(r"/run/secrets/(\w+)", json.dumps(service)):
            assert path in service["secrets"]


def test_daemons_take_what_compose_says(compose: dict[str, Any], tmp_path: Path) -> None:
    names = set()
    daemons = [s for s in compose["services"].values() if s.get("command") == ["serve"]]
    assert len(daemons) == 3
    for service in daemons:
        environ = stand_ins(tmp_path, service["environment"])
        config = load(environ=environ)
        assert config.memory == 512 << 20
        assert config.listen == ("tcp://0.0.0.0:7070",)
        assert config.advertise == (f"tcp://{config.node}:7070",)
        assert config.cluster_secret_file == environ["KVPOOL_CLUSTER_SECRET_FILE"]
        assert not config.plaintext and config.tls_cert
        assert service["hostname"] == config.node
        names.add(config.node)
    assert names == set(compose["services"]["setup"]["command"])


def stand_ins(tmp_path: Path, given: dict[str, str]) -> dict[str, str]:
    """The environment, with defaults filled in, and files of ours instead of those of another machine."""
    environ = {}
    for name, value in given.items():
        plain = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)
        assert name.removeprefix("KVPOOL_").removesuffix("_FILE").lower() in SETTINGS, name
        if plain.startswith(("/run/secrets/", "/etc/kvpool/")):
            path = tmp_path / Path(plain).name
            path.write_text("0123456789abcdef0123456789abcdef")
            path.chmod(0o600)
            plain = str(path)
        environ[name] = plain
    return environ


def test_the_routers_command_line_in_compose(compose: dict[str, Any]) -> None:
    command, *words = compose["services"]["router"]["command"]
    assert command == "router"
    assert "--plaintext" in words
    given = [word.removeprefix("--").split("=") for word in words if "=" in word]
    networks = [value for name, value in given if name == "announced-from"]
    flags = {
        "listen": dict(given)["listen"],
        "announced_from": networks,
        "plaintext": True,
    }
    config, _ = load_router(flags=flags, environ={"KVPOOL_ROUTER_TOKEN": "x" * 16})
    assert len(config.announced_from) == 2


def test_prometheus_asks_where_compose_answers(compose: dict[str, Any]) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    for scrape in config["scrape_configs"]:
        for target in scrape["static_configs"][0]["targets"]:
            host, port = target.split(":")
            assert host in compose["services"]
            assert port == ("8080" if host == "router" else "7071")
    jobs = {scrape["job_name"] for scrape in config["scrape_configs"]}
    assert jobs == set(re.findall(r'job="([^"]+)"', ALERTS.read_text()))
    provisioned = DEPLOY / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioned / "datasources" / "prometheus.yaml").read_text())
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_setup_makes_what_nodes_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpool.admin.tokens import digest_of, read_tokens
    from kvpool.security.credentials import Credentials, TlsFiles

    setup = load_script(DEPLOY / "compose" / "setup.py")
    for name in ("authority", "nodes", "public", "run/secrets"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run/secrets/metrics_token").write_text("a token\n")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    mask = os.umask(0)
    try:
        for node in ("a", "b"):
            (tmp_path / "nodes" / node).mkdir()
        setup.main(["a", "b"], tmp_path, os.getuid())
        first = (tmp_path / "nodes" / "a" / "node.pem").read_bytes()
        setup.main(["a", "b"], tmp_path, os.getuid())
    finally:
        os.umask(mask)
    for name in ("a", "b"):
        folder = tmp_path / "nodes" / name
        assert (folder / "node.key").stat().st_mode & 0o777 == 0o600
        assert (folder / "http-tokens.toml").stat().st_mode & 0o777 == 0o600
        files = TlsFiles(str(folder / "node.pem"), str(folder / "node.key"), str(folder / "ca.pem"))
        assert Credentials(files, "kvpool", name).current()
        (entry,) = read_tokens(folder / "http-tokens.toml")
        assert entry.role == "viewer" and entry.sha256 == digest_of("a token").hex()
    assert (tmp_path / "nodes" / "a" / "node.pem").read_bytes() == first, "made once"
    assert (tmp_path / "public" / "ca.pem").stat().st_mode & 0o004


@pytest.mark.skipif(shutil.which("docker") is None, reason="there is no docker here")
def test_docker_compose_takes_the_file(tmp_path: Path) -> None:
    if subprocess.run(
        ["docker", "compose", "version"], capture_output=True, check=False
    ).returncode:
        pytest.skip("docker has no compose here")
    done = subprocess.run(
        ["docker", "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# ---- systemd ------------------------------------------------------------------------------------------------


def unit_lines(path: Path) -> list[tuple[str, str]]:
    lines = [line for line in path.read_text().splitlines() if "=" in line and line[0] != "#"]
    return [tuple(line.split("=", 1)) for line in lines]


@pytest.mark.parametrize("path", [*UNITS, *DROP_INS], ids=lambda path: path.name)
def test_units_set_what_exists(path: Path) -> None:
    for key, value in unit_lines(path):
        if key == "Environment":
            for pair in shlex.split(value):
                name = pair.split("=")[0]
                setting = name.removeprefix("KVPOOL_")
                base = setting.removesuffix("_FILE").lower()
                assert (
                    name == "PYTHONUNBUFFERED"
                    or setting.lower() in SETTINGS
                    or (base in SECRETS and setting.endswith("_FILE"))
                ), name
        if key.startswith("Exec"):
            command = value.lstrip("-").split()
            assert command[0] == "/opt/kvpool/bin/kvpool"
            assert command[1] in commands()


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_what_comes_after_a_unit_finds_it_ready(path: Path) -> None:
    assert dict(unit_lines(path))["Type"] == "notify"


def test_a_stop_is_given_the_time_that_it_takes() -> None:
    default = load(environ={})
    times = {path.stem: dict(unit_lines(path))["TimeoutStopSec"] for path in UNITS}
    assert int(times["kvpool"]) > default.ssd_flush_s + 30
    router, _ = load_router(environ={})
    assert int(times["kvpool-router"]) > router.drain_s
    drain = dict(unit_lines(DEPLOY / "systemd" / "kvpool.service.d" / "drain.conf"))
    timeout = int(re.search(r"--timeout (\d+)", drain["ExecStop"])[1])
    assert timeout > default.ssd_drain_s
    assert int(drain["TimeoutStopSec"]) >= timeout + int(times["kvpool"])


def test_what_a_daemon_keeps_for_the_next_one_outlives_a_restart() -> None:
    # systemd empties /run/kvpool otherwise: a share of the memory would come back smaller, and nobody would be told.
    assert ("RuntimeDirectoryPreserve", "restart") in unit_lines(
        DEPLOY / "systemd" / "kvpool.service"
    )


def test_clients_reach_the_socket_and_no_file_of_the_daemon() -> None:
    unit = dict(unit_lines(DEPLOY / "systemd" / "kvpool.service"))
    assert (unit["User"], unit["Group"]) == ("kvpool", "kvpool-clients")
    assert unit["RuntimeDirectoryMode"] == "0750"
    assert (unit["StateDirectoryMode"], unit["UMask"]) == ("0700", "0077")
    users = (DEPLOY / "systemd" / "kvpool.sysusers.conf").read_text()
    assert "g kvpool-clients -" in users.splitlines()
    assert "install -D -m 0600 -o kvpool" in (DEPLOY / "README.md").read_text()


needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here"
)


@needs_systemd
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_takes_the_units(path: Path, tmp_path: Path) -> None:
    # With all drop-ins, and with a program that is there.
    text = path.read_text().replace("/opt/kvpool/bin/kvpool", sys.executable)
    (tmp_path / path.name).write_text(text)
    folder = tmp_path / f"{path.name}.d"
    folder.mkdir()
    if path.stem == "kvpool":
        for drop_in in DROP_INS:
            changed = drop_in.read_text().replace("/opt/kvpool/bin/kvpool", sys.executable)
            (folder / drop_in.name).write_text(changed)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / path.name)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )
    ours = [line for line in done.stderr.splitlines() if path.stem in line]
    assert done.returncode == 0 and not ours, done.stderr


@needs_systemd
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_are_shut_in(path: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert match, done.stdout + done.stderr
    assert float(match[1]) <= EXPOSURE_MAX, done.stdout


def test_the_example_files_are_taken(tmp_path: Path) -> None:
    names = ("kvpool.toml", "cluster.toml")
    text = "".join((DEPLOY / "systemd" / name).read_text() for name in names)
    for path in re.findall(r'"(/etc/kvpool/[^"]+)"', text):
        stand_in = tmp_path / Path(path).name
        stand_in.touch(mode=0o600)
        text = text.replace(path, str(stand_in))
    file = tmp_path / "kvpool.toml"
    file.write_text(text)
    key = tmp_path / "key"
    key.touch(mode=0o600)
    config = load(file=str(file), environ={"KVPOOL_TLS_KEY": str(key)})
    assert config.socket_mode == 0o660 and config.labels == {"zone": "a", "rack": "7"}
    settings, _ = load_router(
        file=str(DEPLOY / "systemd" / "router.toml"), environ={"KVPOOL_ROUTER_TOKEN": "x" * 16}
    )
    assert settings.listen.endswith(":8080")


# ---- ports --------------------------------------------------------------------------------------------------


def test_scripts_in_yaml_are_python() -> None:
    text = (CHART / "templates" / "daemonset.yaml").read_text()
    blocks = re.findall(r"- -c\n\s+- \|\n((?:\s{14,}.+\n)+)", text)
    assert len(blocks) >= 3
    for block in blocks:
        indent = len(block) - len(block.lstrip())
        lines = []
        for line in block.splitlines():
            if len(line) - len(line.lstrip()) < indent:
                break
            lines.append(line[indent:])
        ast.parse(re.sub(r"\{\{.*?\}\}", "0", "\n".join(lines)))

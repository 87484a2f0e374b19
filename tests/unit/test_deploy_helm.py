"""The Helm chart, rendered by Helm itself: manifests that Kubernetes takes, and that fit together.

Rendered by `helm` on PATH, or else by the Helm library of the package helm-python-sdk. It and the schemas of
Kubernetes come with `make deploy-tools`; without them these tests are skipped.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpool import __version__
from kvpool.config import SETTINGS, load
from kvpool.router.config import load as load_router

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="what checks the chart is not here: make deploy-tools"
)

ROOT = Path(__file__).resolve().parent.parent.parent
CHART = ROOT / "deploy" / "helm" / "kvpool"
DAEMON_USER = 10001
VERSIONS = ("1.27", "1.32", "1.34")  # of Kubernetes
OPERATOR_KINDS = {"ServiceMonitor", "PrometheusRule"}  # custom resources, which have no schema here
SECRET_KEYS = {
    *("cluster-secret", "operator-token", "join-password", "directory-password", "router-token"),
    *("engine-api-key", "http-tokens.toml", "metrics-token"),
}

CLEAR = {
    "peers": True,
    "passwords": True,
    "router": True,
}  # the words without which the chart is refused
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {"plaintext": CLEAR},
    "everything": {
        "plaintext": {"passwords": True},
        "tls": {"enabled": True, "crl": True},
        "cluster": {"joinCa": "etcd-ca.pem", "directoryCa": "redis-ca.pem"},
        "image": {"pullSecrets": [{"name": "registry"}]},
        "daemon": {
            "memoryGiB": 64,
            "ssd": {"enabled": True, "sizeGiB": 400},
            "dataHostPath": "/var/lib/kvpool/data",
            "labels": {"zone": "a", "rack": "7"},
            "settings": {"replicas_max": 4, "forward": False, "ssd_write": "through"},
            "hostNetwork": True,
            "hostPID": True,
            "lockMemory": True,
            "extraResources": {"rdma/hca": 1, "hugepages-2Mi": "1Gi"},
            "extraEnv": [{"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"}],
            "extraEnvFrom": [{"secretRef": {"name": "s3"}}],
            "extraVolumes": [{"name": "extra", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "high",
            "podAnnotations": {"a": "b"},
            "podLabels": {"c": "d"},
        },
        "router": {
            "replicas": 3,
            "tls": {"existingSecret": "router-tls", "ca": "router-ca.pem"},
            "settings": {"policy": "kvpool", "ttft_slo_s": 5, "daemon": True},
            "engines": [{"url": "http://vllm-0:8000", "node": "n0", "flexible": True}],
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"operator": "Exists"}],
        },
        "networkPolicy": {
            "gatewayFrom": [{"namespaceSelector": {}}],
            "routerFrom": [{"namespaceSelector": {}}],
        },
        "metrics": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "p"}, "serverName": "kvpool"},
            "rules": {"enabled": True, "labels": {"release": "p"}},
            "dashboards": {"enabled": True},
        },
    },
    "own servers": {
        "plaintext": {"peers": True, "router": True},
        "cluster": {
            "join": "etcds://kvpool@etcd.example:2379",
            "directory": "rediss://redis.example:6379",
        },
        "etcd": {"enabled": False},
        "redis": {"enabled": False},
        "daemon": {"ssd": {"enabled": True, "type": "emptyDir"}, "drain": {"enabled": False}},
    },
    "without redis and router": {
        "plaintext": CLEAR,
        "redis": {"enabled": False},
        "router": {"enabled": False},
        "etcd": {"replicas": 1},
        "daemon": {"prepareFolders": False},
        "serviceAccount": {"create": False},
    },
    "the router alone has a certificate": {
        "plaintext": {"peers": True, "passwords": True},
        "router": {"tls": {"existingSecret": "router-tls", "ca": "router-ca.pem"}},
    },
    "own configuration": {"plaintext": CLEAR, "daemon": {"existingConfigSecret": "mine"}},
}

Manifest = dict[str, Any]


class Refused(Exception):
    """Helm does not take the values."""


def render(values: dict[str, Any]) -> list[Manifest]:
    """All manifests for these values. Raises `Refused`."""
    if shutil.which("helm") is not None:
        command = ["helm", "template", "release-name", str(CHART), "--values", "-"]
        done = subprocess.run(
            command, input=json.dumps(values), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Refused(done.stderr)
        texts = [done.stdout]
    elif importlib.util.find_spec("helm_python") is not None:
        import helm_python

        chart = helm_python.Chart.load(CHART)
        try:
            chart.validate_schema(values)
            found = chart.render(values)
        except helm_python.HelmError as error:
            raise Refused(str(error)) from None
        texts = [text for path, text in found.items() if path.endswith(".yaml")]
    else:
        pytest.skip("there is neither helm on PATH nor the package helm-python-sdk")
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


@pytest.fixture(scope="module", params=list(VARIANTS))
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def manifests(variant: str) -> list[Manifest]:
    return render(VARIANTS[variant])


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] == kind}


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return [one for one in manifests if one["kind"] in {"DaemonSet", "Deployment", "StatefulSet"}]


def pod_of(workload: Manifest) -> Manifest:
    return workload["spec"]["template"]["spec"]


def containers_of(workload: Manifest) -> list[Manifest]:
    pod = pod_of(workload)
    return [*pod.get("initContainers", []), *pod["containers"]]


def daemonset(manifests: list[Manifest]) -> Manifest:
    (found,) = of_kind(manifests, "DaemonSet").values()
    return found


# ---- Kubernetes' own schemas ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_them(manifests: list[Manifest], version: str) -> None:
    checked = 0
    for one in manifests:
        if one["kind"] in OPERATOR_KINDS:
            assert one["apiVersion"] == "monitoring.coreos.com/v1"
            continue
        kubernetes_validate.validate(one, version, strict=True)
        checked += 1
    assert checked >= 8


def test_names_are_unique_and_fit(manifests: list[Manifest]) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for _, name in names)


# ---- what refers to what -------------------------------------------------------------------------------------


def test_selectors_choose_their_own_pods_and_nobody_elses(manifests: list[Manifest]) -> None:
    pods = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"]
        for one in workloads(manifests)
    }

    def chosen(selector: dict[str, str]) -> set[str]:
        return {name for name, labels in pods.items() if selector.items() <= labels.items()}

    for one in workloads(manifests):
        selector = one["spec"]["selector"]["matchLabels"]
        assert chosen(selector) == {one["metadata"]["name"]}
    for one in of_kind(manifests, "Service").values():
        assert len(chosen(one["spec"]["selector"])) == 1
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for one in of_kind(manifests, kind).values():
            spec = one["spec"]
            selector = spec.get("selector") or spec["podSelector"]
            assert len(chosen(selector["matchLabels"])) == 1
            for rule in spec.get("ingress", []):
                for peer in rule["from"]:
                    labels = peer.get("podSelector", {}).get("matchLabels", {})
                    assert not labels or len(chosen(labels)) == 1
    services = of_kind(manifests, "Service").values()
    for one in of_kind(manifests, "ServiceMonitor").values():
        labels = one["spec"]["selector"]["matchLabels"]
        found = [s for s in services if labels.items() <= s["metadata"]["labels"].items()]
        assert len(found) == 1
        (endpoint,) = one["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in found[0]["spec"]["ports"]}


def test_ports_that_are_named_exist(manifests: list[Manifest]) -> None:
    by_labels = []
    for one in workloads(manifests):
        ports = set()
        for container in containers_of(one):
            own = {port["name"] for port in container.get("ports", [])}
            ports |= own
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                how = container.get(probe, {})
                for kind in ("httpGet", "tcpSocket"):
                    if kind in how:
                        assert how[kind]["port"] in own, (container["name"], probe)
        by_labels.append((one["spec"]["template"]["metadata"]["labels"], ports))

    def ports_behind(selector: dict[str, str]) -> set[str]:
        return next(ports for labels, ports in by_labels if selector.items() <= labels.items())

    for one in of_kind(manifests, "Service").values():
        for port in one["spec"]["ports"]:
            assert port["targetPort"] in ports_behind(one["spec"]["selector"])
    for one in of_kind(manifests, "NetworkPolicy").values():
        there = ports_behind(one["spec"]["podSelector"]["matchLabels"])
        named = {port["port"] for rule in one["spec"]["ingress"] for port in rule["ports"]}
        assert named <= there


def test_volumes_and_what_they_come_from(manifests: list[Manifest]) -> None:
    maps = of_kind(manifests, "ConfigMap")
    for one in workloads(manifests):
        volumes = {volume["name"]: volume for volume in pod_of(one).get("volumes", [])}
        claims = {c["metadata"]["name"] for c in one["spec"].get("volumeClaimTemplates", [])}
        used = {
            mount["name"]
            for container in containers_of(one)
            for mount in container.get("volumeMounts", [])
        }
        assert used == set(volumes) | claims
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps
            if "hostPath" in volume:
                assert volume["hostPath"]["path"].startswith("/")


def test_paths_in_commands_are_mounted(manifests: list[Manifest]) -> None:
    seen = 0
    for one in workloads(manifests):
        for container in containers_of(one):
            mounts = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            words = [*container.get("command", []), *container.get("args", [])]
            for path in re.findall(r"(?<![\w:/])/(?:etc|run|var|tmp)/[\w./-]+", "\n".join(words)):
                assert any(path == at or path.startswith(f"{at}/") for at in mounts), path
                seen += 1
    assert seen >= 3


def test_single_files_that_are_mounted_are_in_their_maps(manifests: list[Manifest]) -> None:
    maps = of_kind(manifests, "ConfigMap")
    for one in workloads(manifests):
        volumes = {volume["name"]: volume for volume in pod_of(one).get("volumes", [])}
        for container in containers_of(one):
            for mount in container.get("volumeMounts", []):
                source = volumes.get(mount["name"], {}).get("configMap")
                if source and "subPath" in mount:
                    assert mount["subPath"] in maps[source["name"]]["data"]


def test_secrets_are_named_and_never_written(manifests: list[Manifest]) -> None:
    assert not of_kind(manifests, "Secret")
    found = set()
    for one in workloads(manifests):
        for container in containers_of(one):
            for variable in container.get("env", []):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference:
                    assert reference["name"] == "kvpool-secrets"
                    found.add(reference["key"])
    assert found <= SECRET_KEYS
    # The cluster's is a file, which changes with the Secret.
    pod = pod_of(daemonset(manifests))
    secrets = {v["name"]: v for v in pod["volumes"]}["secrets"]["secret"]
    assert secrets["items"] == [{"key": "cluster-secret", "path": "cluster-secret"}]
    (daemon,) = pod["containers"]
    mounted = {m["name"]: m for m in daemon["volumeMounts"]}["secrets"]
    assert "subPath" not in mounted, "it would never change"
    file = environment(daemon)["KVPOOL_CLUSTER_SECRET_FILE"]
    assert file == f"{mounted['mountPath']}/cluster-secret"
    values = (CHART / "values.yaml").read_text()
    assert all(key in values for key in found - {"engine-api-key"})


def test_the_readmes_command_is_taken() -> None:
    text = (ROOT / "deploy" / "README.md").read_text()
    given = re.findall(r"--set ([\w.]+)=(\S+)", text[text.index("helm -n llm install") :])
    assert len(given) >= 4
    values: dict[str, Any] = {}
    for path, value in given:
        *folders, name = path.split(".")
        place = values
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = yaml.safe_load(value)
    assert render(values)


def test_values_of_a_release_without_the_routers_certificate() -> None:
    assert render({"plaintext": CLEAR, "router": {"tls": None}})


def test_service_names_in_configurations_exist(manifests: list[Manifest]) -> None:
    services = of_kind(manifests, "Service")
    sets = of_kind(manifests, "StatefulSet")
    config = of_kind(manifests, "ConfigMap").get("release-name-kvpool-daemon")
    if config is None:
        return
    values = tomllib.loads(config["data"]["kvpool.toml"])
    urls = [values.get("join", ""), values.get("directory", ""), *values.get("routers", [])]
    assert any("-router" in url for url in urls) == bool(of_kind(manifests, "Deployment"))
    for url in urls:
        for host in re.findall(r"[/,]([\w.-]*release-name[\w.-]*):(\d+)", url):
            parts = host[0].split(".")
            service = services[parts[-1]]
            assert int(host[1]) in {port["port"] for port in service["spec"]["ports"]}
            if len(parts) == 2:
                pod, number = parts[0].rsplit("-", 1)
                assert int(number) < sets[pod]["spec"]["replicas"]
                assert sets[pod]["spec"]["serviceName"] == parts[1]


# ---- what kvpool makes of it ---------------------------------------------------------------------------------


def environment(container: Manifest) -> dict[str, str]:
    """As the kubelet makes it, on node n1 with address 10.0.0.9; a secret is some text."""
    made: dict[str, str] = {}
    for variable in container["env"]:
        if "value" in variable:
            value = re.sub(r"\$\((\w+)\)", lambda match: made[match[1]], variable["value"])
        elif "fieldRef" in variable["valueFrom"]:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            value = {"spec.nodeName": "n1", "status.podIP": "10.0.0.9", "metadata.name": "p"}[path]
        else:
            value = "0123456789abcdef0123456789abcdef"
        made[variable["name"]] = value
    return made


def test_the_daemon_takes_its_configuration(
    manifests: list[Manifest], variant: str, tmp_path: Path
) -> None:
    (container,) = pod_of(daemonset(manifests))["containers"]
    environ = environment(container)
    maps = of_kind(manifests, "ConfigMap")
    text = 'listen = ["tcp://0.0.0.0:7070"]'  # of somebody else's making
    if variant != "own configuration":
        text = maps["release-name-kvpool-daemon"]["data"]["kvpool.toml"]
    for name in environ:
        if name.startswith("KVPOOL_"):
            assert name.removeprefix("KVPOOL_").lower() in SETTINGS

    def here(value: str) -> str:
        """A file of ours instead of one of the pod's."""
        for path in re.findall(r"/(?:etc/kvpool|run/kvpool-tokens)/[\w./-]+", value):
            assert any(path.startswith(m["mountPath"]) for m in container["volumeMounts"]), path
            stand_in = tmp_path / Path(path).name
            stand_in.touch(mode=0o600)
            value = value.replace(path, str(stand_in))
        return value

    file = tmp_path / "kvpool.toml"
    file.write_text(here(text))
    config = load(file=str(file), environ={name: here(value) for name, value in environ.items()})
    assert config.node == "n1"
    assert config.advertise == ("tcp://10.0.0.9:7070",)
    if variant == "everything":
        assert config.memory == 64 << 30 and config.replicas_max == 4 and not config.forward
        assert config.labels == {"zone": "a", "rack": "7"}
        assert config.ssd[0].size == 400 << 30
        assert config.tls_cert.endswith("node-n1.pem") and not config.plaintext
        assert config.router_ca == config.tls_ca.replace("ca.pem", "router-ca.pem")
    elif variant != "own configuration":
        assert config.plaintext, "no certificates: said in so many words"
        limit = container["resources"]["limits"]["memory"]
        assert int(limit.removesuffix("Mi")) << 20 > config.memory


def test_the_router_takes_its_configuration(manifests: list[Manifest], tmp_path: Path) -> None:
    routers = of_kind(manifests, "Deployment")
    if not routers:
        return
    (router,) = routers.values()
    (container,) = pod_of(router)["containers"]
    file = tmp_path / "router.toml"
    file.write_text(
        of_kind(manifests, "ConfigMap")["release-name-kvpool-router"]["data"]["router.toml"]
    )
    config, secrets = load_router(file=str(file), environ=environment(container))
    assert config.address[1] == container["ports"][0]["containerPort"]
    assert secrets.token and config.socket == "/run/kvpool/kvpool.sock"
    probe = container["readinessProbe"]["httpGet"]
    if config.plaintext:
        assert (config.tls_cert, probe["scheme"]) == ("", "HTTP")
    else:
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert config.tls_cert == f"{mounts['tls']}/tls.crt"
        assert (config.tls_key, probe["scheme"]) == (f"{mounts['tls']}/tls.key", "HTTPS")
    assert pod_of(router)["terminationGracePeriodSeconds"] > config.drain_s + 5
    scheme = "http" if config.plaintext else "https"
    services = of_kind(manifests, "Service")
    alone = router["spec"]["replicas"] == 1
    assert config.routers == (() if alone else (f"{scheme}://release-name-kvpool-routers:8080",))
    assert services["release-name-kvpool-routers"]["spec"]["clusterIP"] == "None"
    if config.routers_ca:
        volumes = {volume["name"]: volume for volume in pod_of(router)["volumes"]}
        assert config.routers_ca == f"{mounts['routers-ca']}/router-ca.pem"
        assert volumes["routers-ca"]["secret"]["secretName"] == "kvpool-tls"
    assert bool(config.routers_ca) == (not alone and not config.plaintext)
    socket = {v["name"]: v for v in pod_of(router)["volumes"]}["socket"]["hostPath"]["path"]
    daemons = {v["name"]: v for v in pod_of(daemonset(manifests))["volumes"]}
    assert socket == daemons["socket"]["hostPath"]["path"]


def test_a_pod_ends_in_its_own_time(manifests: list[Manifest], variant: str) -> None:
    pod = pod_of(daemonset(manifests))
    (container,) = pod["containers"]
    grace = pod["terminationGracePeriodSeconds"]
    flush = load(environ={}).ssd_flush_s
    if variant == "own servers":
        assert "lifecycle" not in container and grace > flush
        return
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["python", "-c"]
    compile(command[2], "preStop", "exec")
    timeout = int(re.search(r'"--timeout", "(\d+)"', command[2])[1])
    assert '["kvpool", "drain", os.environ["KVPOOL_NODE"]' in command[2]
    assert grace >= timeout + flush + 60


def test_what_is_scraped_is_verified() -> None:
    """Prometheus sends its token, so it must know to whom. Daemons only with a name that all certificates have."""
    variant = VARIANTS["everything"]
    daemon, router = endpoints(variant)
    authority = {"secret": {"name": "kvpool-tls", "key": "ca.pem"}}
    assert daemon["tlsConfig"] == {"ca": authority, "serverName": "kvpool"}
    authority = {"secret": {"name": "kvpool-tls", "key": "router-ca.pem"}}
    assert router["tlsConfig"] == {"ca": authority, "serverName": "release-name-kvpool-router"}
    metrics = {"serviceMonitor": {"enabled": True}}
    daemon, router = endpoints({**variant, "metrics": metrics})
    assert daemon["tlsConfig"] == {"insecureSkipVerify": True}
    public = {"plaintext": CLEAR, "router": {"tls": {"existingSecret": "public"}}}
    daemon, router = endpoints({**public, "metrics": metrics})
    assert "tlsConfig" not in daemon
    assert router["tlsConfig"] == {"serverName": "release-name-kvpool-router"}


def endpoints(values: dict[str, Any]) -> tuple[Any, Any]:
    """What Prometheus asks: of daemons, and of routers."""
    monitors = of_kind(render(values), "ServiceMonitor")
    daemon, router = (monitors[f"release-name-kvpool-{of}"] for of in ("daemon", "router"))
    return daemon["spec"]["endpoints"][0], router["spec"]["endpoints"][0]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "plaintext."),
        ({"plaintext": {"peers": True}}, "plaintext.passwords"),
        ({"plaintext": {"passwords": True}}, "plaintext.peers"),
        ({"tls": {"enabled": True}}, "plaintext.passwords"),
    ],
)
def test_nothing_goes_in_the_clear_without_a_word(values: dict[str, Any], word: str) -> None:
    with pytest.raises(Refused, match=word):
        render(values)
    assert render({**values, "plaintext": CLEAR})


# ---- who may do what -----------------------------------------------------------------------------------------


def test_nobody_is_root_but_the_one_that_hands_folders_over(manifests: list[Manifest]) -> None:
    for one in workloads(manifests):
        pod = pod_of(one)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == DAEMON_USER
        for container in containers_of(one):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            added = security["capabilities"].get("add", [])
            if container["name"] == "folders":
                assert security["runAsUser"] == 0 and added == ["CHOWN"]
            else:
                assert security["runAsNonRoot"] is True and added in ([], ["IPC_LOCK"])
            assert "memory" in container["resources"]["limits"]
            assert not container.get("env") or container["name"] not in {"folders", "tokens"}


def test_probes_of_the_daemon(manifests: list[Manifest], variant: str) -> None:
    (container,) = pod_of(daemonset(manifests))["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    scheme = container["livenessProbe"]["httpGet"]["scheme"]
    assert scheme == ("HTTPS" if variant == "everything" else "HTTP")


# ---- the chart itself ----------------------------------------------------------------------------------------


def test_rules_and_dashboards_are_those_beside_the_chart() -> None:
    manifests = render(VARIANTS["everything"])
    (rules,) = of_kind(manifests, "PrometheusRule").values()
    alerts = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
    assert rules["spec"] == alerts
    boards = {
        name: one["data"]
        for name, one in of_kind(manifests, "ConfigMap").items()
        if "-dashboard-" in name
    }
    assert len(boards) == 3
    for data in boards.values():
        ((name, text),) = data.items()
        assert json.loads(text) == json.loads((ROOT / "deploy" / "grafana" / name).read_text())


@pytest.mark.parametrize(
    "values",
    [
        {"daemon": {"memoryGiB": "8"}},
        {"daemon": {"memoryGB": 8}},
        {"daemon": {"ssd": {"type": "pvc"}}},
        {"cluster": {"join": "http://etcd:2379"}},
        {"cluster": {"directory": "redis://:password@redis:6379"}},
        {"etcd": {"replicas": 2}},
        {"router": {"engines": [{"node": "a"}]}},
        {"etcd": {"enabled": False}},
        {"nonsense": 1},
    ],
    ids=json.dumps,
)
def test_values_that_are_not_right_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        render(values)


def test_every_value_is_in_the_schema_and_used() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())

    def walk(value: Any, place: dict[str, Any], path: tuple[str, ...]) -> None:
        properties = place.get("properties") if path[-1:] != ("resources",) else None
        if not isinstance(value, dict) or properties is None:
            assert re.search(rf"\.{path[-1]}\b", templates), f"{'.'.join(path)} is not used"
            return
        assert set(value) <= set(properties), path
        missing = set(properties) - set(value) - {"global"}
        assert not missing, (path, missing)
        for key, each in value.items():
            walk(each, properties[key], (*path, key))

    walk(values, schema, ())


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_lint() -> None:
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("the package helm-python-sdk is not here")
    import helm_python

    report = helm_python.lint(CHART, strict=True)
    assert not report["errors"]
    assert all(message["severity"] < 2 for message in report["messages"])

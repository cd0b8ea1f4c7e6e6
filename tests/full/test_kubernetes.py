"""Manifests agree with each other, with our code, and with the schemas of Kubernetes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from bapo.config.load import load_config
from bapo.config.tree import Config
from bapo.runtime.machine import GIB, engine_bytes, learner_bytes, learner_gib, parallelism_problem, run_bytes
from bapo.runtime.rank_environment import Nodes, nodes_of

Manifest = dict[str, Any]

REPOSITORY = Path(__file__).parents[2]
K8S = REPOSITORY / "deploy" / "k8s"
OVERLAYS = ("cpu-demo", "gpu", "monitoring", "gpu-monitoring", "keda")
CRDS = "BAPO_TEST_CRDS"
TEMPLATES = {
    "Deployment": [("template",)],
    "StatefulSet": [("template",)],
    "Job": [("template",)],
    "RayCluster": [("headGroupSpec", "template")],
}


@cache
def build(overlay: str) -> tuple[Manifest, ...]:
    """The manifests of an overlay. Skips the test where there is no kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: overlays cannot be built")
    built = subprocess.run(
        ["kubectl", "kustomize", str(K8S / "overlays" / overlay)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return tuple(found for found in yaml.safe_load_all(built.stdout) if found)


def of_kind(overlay: str, kind: str) -> dict[str, Manifest]:
    """Name -> manifest."""
    return {found["metadata"]["name"]: found for found in build(overlay) if found["kind"] == kind}


def pods(manifests: tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    """(where, pod template) of everything that makes pods."""
    for found in manifests:
        name, spec = f"{found['kind']}/{found['metadata']['name']}", found.get("spec", {})
        for path in TEMPLATES.get(found["kind"], []):
            template = spec
            for key in path:
                template = template[key]
            yield name, template
        for group in spec.get("workerGroupSpecs", []):
            yield f"{name}/{group['groupName']}", group["template"]


def containers(template: Manifest) -> list[Manifest]:
    """Init containers, too."""
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


@cache
def custom_schemas() -> dict[tuple[str, str], jsonschema.Draft7Validator]:
    """(apiVersion, kind) -> its CRD. Skips the test when no folder is named."""
    folder = os.environ.get(CRDS)
    if not folder:
        pytest.skip(f"{CRDS} names no folder of CRDs: custom resources are not checked")
    found = {}
    for path in sorted(Path(folder).glob("*.yaml")):
        for crd in yaml.safe_load_all(path.read_text()):
            if not crd or crd.get("kind") != "CustomResourceDefinition":
                continue
            for version in crd["spec"]["versions"]:
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                key = (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"])
                found[key] = jsonschema.Draft7Validator(schema)
    return found


def strict(schema: Any) -> Any:
    """The schema with unknown keys refused, as an API server drops or refuses them."""
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict_below(key, value) for key, value in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if made.get("nullable") and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    open_ended = "additionalProperties" in made or made.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in made and not open_ended:
        made["additionalProperties"] = False
    return made


def _strict_below(key: str, value: Any) -> Any:
    if key == "properties":
        return {name: strict(below) for name, below in value.items()}
    return strict(value) if key in ("items", "additionalProperties") else value


KEEPS_ACCOUNT = {"RayCluster/bapo-ray"}
"""KubeRay's autoscaler runs beside the head and asks the API server for pods."""


def config_of(overlay: str) -> Config:
    """What the pods of an overlay are configured with."""
    source = {"monitoring": "cpu-demo", "gpu-monitoring": "gpu"}.get(overlay, overlay)
    return load_config([str(K8S / "overlays" / source / "run.toml")], [])


def labels_of(template: Manifest) -> dict[str, str]:
    return dict(template["metadata"]["labels"])


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """matchLabels and matchExpressions with In, or plain labels of a Service."""
    wanted = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
    expressions = selector.get("matchExpressions", [])
    return wanted.items() <= labels.items() and all(labels.get(e["key"]) in e["values"] for e in expressions)


def ports_by_name(template: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for each in containers(template) for port in each.get("ports", [])}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_restricted(overlay: str) -> None:
    for where, template in pods(build(overlay)):
        spec = template["spec"]
        pod = spec["securityContext"]
        assert (pod["runAsNonRoot"], pod["runAsUser"], pod["seccompProfile"]["type"]) == (
            True,
            10001,
            "RuntimeDefault",
        ), where
        assert spec.get("automountServiceAccountToken") is (None if where in KEEPS_ACCOUNT else False), where
        assert spec["enableServiceLinks"] is False, where
        for each in containers(template):
            found = each["securityContext"]
            rights = (found["allowPrivilegeEscalation"], found["readOnlyRootFilesystem"], found["capabilities"])
            assert rights == (False, True, {"drop": ["ALL"]}), f"{where} {each['name']}"
            assert {"requests", "limits"} <= each["resources"].keys(), f"{where} {each['name']}"
            assert "memory" in each["resources"]["limits"], f"{where} {each['name']}"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_service_leads_to_a_port_of_a_pod(overlay: str) -> None:
    for name, service in of_kind(overlay, "Service").items():
        chosen = [
            template
            for _, template in pods(build(overlay))
            if selects(service["spec"]["selector"], labels_of(template))
        ]
        assert len(chosen) == 1, name
        for port in service["spec"]["ports"]:
            assert ports_by_name(chosen[0])[port["targetPort"]] == port["port"], name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_whoever_calls_somebody_is_let_in(overlay: str) -> None:
    policies = of_kind(overlay, "NetworkPolicy")
    for where, template in pods(build(overlay)):
        labels = labels_of(template)
        assert labels["app.kubernetes.io/part-of"] == "bapo", where
        for each in template["spec"]["containers"]:
            for host in re.findall(r"http://([a-z-]+):|@(bapo-redis):", " ".join(each.get("args", []))):
                callee = "".join(host)
                rules = policies[callee]["spec"]["ingress"]
                assert any(selects(peer["podSelector"], labels) for rule in rules for peer in rule["from"]), (
                    where,
                    callee,
                )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_volume_is_there_and_every_secret_is_made(overlay: str, secrets: dict[str, set[str]]) -> None:
    claims = of_kind(overlay, "PersistentVolumeClaim")
    maps = of_kind(overlay, "ConfigMap")
    for where, template in pods(build(overlay)):
        volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", [])}
        made = {claim["metadata"]["name"] for claim in _claims_of(overlay, where)}
        for each in containers(template):
            mounted = {mount["name"]: mount["mountPath"] for mount in each.get("volumeMounts", [])}
            assert mounted.keys() <= volumes.keys() | made, f"{where} {each['name']}"
            for variable in each.get("env", []):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                assert reference is None or reference["key"] in secrets[reference["name"]], variable
                if variable["name"].endswith("_FILE"):
                    folder, _, key = variable["value"].rpartition("/")
                    volume = next(volumes[name] for name, path in mounted.items() if path == folder)
                    assert key in secrets[volume["secret"]["secretName"]], variable
            assert {source["configMapRef"]["name"] for source in each.get("envFrom", [])} <= maps.keys()
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {"claimName": "bapo-outputs"})["claimName"] in claims, where
            assert "secret" not in volume or volume["secret"]["secretName"] in secrets, where
            assert "configMap" not in volume or volume["configMap"]["name"] in maps, where


def _claims_of(overlay: str, where: str) -> list[Manifest]:
    kind, _, name = where.partition("/")
    return list(of_kind(overlay, kind)[name.partition("/")[0]]["spec"].get("volumeClaimTemplates", []))


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Name -> keys, of the secrets that the documented command makes."""
    build("cpu-demo")  # skips without kubectl
    folder = tmp_path_factory.mktemp("secrets")
    command = folder / "bapo"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bapo.cli.app "$@"\n')
    command.chmod(0o755)
    made = subprocess.run(
        [str(K8S / "secrets.sh"), str(folder / "set")],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = [manifest for manifest in yaml.safe_load_all(made.stdout) if manifest]
    assert {manifest["metadata"]["namespace"] for manifest in found} == {"bapo"}
    assert all(value for manifest in found for value in manifest["data"].values())
    return {manifest["metadata"]["name"]: set(manifest["data"]) for manifest in found}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_buffer_waits_for_redis_as_long_as_its_start_may_take(overlay: str) -> None:
    """One that ended before would be started again after ever longer pauses, up to five minutes."""
    (buffer,) = containers(of_kind(overlay, "Deployment")["bapo-buffer"]["spec"]["template"])[-1:]
    probe = buffer["startupProbe"]
    (waits,) = (float(arg.partition("=")[2]) for arg in buffer["args"] if arg.startswith("--redis-timeout-s="))
    assert 300 < waits < probe["periodSeconds"] * probe["failureThreshold"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_commands_and_their_flags_exist(overlay: str) -> None:
    common = (REPOSITORY / "bapo" / "runtime" / "process.py").read_text()
    seen = set()
    for where, template in pods(build(overlay)):
        for each in template["spec"]["containers"]:
            words = " ".join(each.get("args", []))
            module = re.search(r"(?:^|-m )(buffer_service|rollout_server|learner|services\.\w+)\b", words)
            if module is None:
                continue
            source = common + (REPOSITORY / module[1].replace(".", "/") / "__main__.py").read_text()
            tail = words[module.start() :]
            flags = re.findall(r"(--[a-z-]+)", tail)
            assert [flag for flag in flags if f'"{flag}"' not in source] == [], where
            seen.add(module[1])
    services = {"services.scheduler", "services.evaluator", "services.dashboard"}
    assert seen == {"buffer_service", "rollout_server", "learner", *services}


@pytest.mark.parametrize("overlay", ["gpu", "gpu-monitoring"])
def test_the_learner_has_a_gpu_for_each_rank_and_memory_that_ranks_share(overlay: str) -> None:
    template = of_kind(overlay, "Job")["bapo-learner"]["spec"]["template"]
    (learner,) = template["spec"]["containers"]
    settings = config_of(overlay).learner
    assert (settings.device, learner["resources"]["limits"]["nvidia.com/gpu"]) == ("cuda", str(settings.num_ranks))
    assert not {variable["name"] for variable in learner["env"]} & {"RANK", "WORLD_SIZE"}, "it starts its ranks itself"
    (name,) = [mount["name"] for mount in learner["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume for volume in template["spec"]["volumes"] if volume["name"] == name]
    assert volume["emptyDir"]["medium"] == "Memory"


def with_components(tmp_path: Path, *components: str) -> tuple[Manifest, ...]:
    """The overlay `gpu` with components, as docs/cluster.md adds them."""
    build("gpu")  # skips without kubectl
    shutil.copytree(K8S, tmp_path / "k8s")
    overlay = tmp_path / "k8s" / "overlays" / "mine"
    overlay.mkdir()
    parts = {"resources": ["../gpu"], "components": [f"../../components/{name}" for name in components]}
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "namespace": "bapo"}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(head | parts))
    built = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return tuple(manifest for manifest in yaml.safe_load_all(built.stdout) if manifest)


def test_rdma_adds_devices_and_the_right_to_pin_memory_to_what_has_gpus_alone(tmp_path: Path) -> None:
    found = with_components(tmp_path, "rdma")
    each = [(where, container) for where, template in pods(found) for container in containers(template)]
    pins = {where for where, container in each if "add" in container["securityContext"]["capabilities"]}
    has_gpu = {where for where, container in each if "nvidia.com/gpu" in container["resources"]["limits"]}
    assert pins == has_gpu == {"Job/bapo-learner", "RayCluster/bapo-ray/rollout"}
    (namespace,) = [manifest for manifest in found if manifest["kind"] == "Namespace"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


def test_a_learner_on_two_hosts_is_an_indexed_job_whose_pods_find_each_other_by_name(tmp_path: Path) -> None:
    found = with_components(tmp_path, "learner-hosts")
    assert [complaints(manifest) for manifest in found if is_core(manifest) and complaints(manifest)] == []
    (job,) = [each["spec"] for each in found if (each["kind"], each["metadata"]["name"]) == ("Job", "bapo-learner")]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    pod = job["template"]["spec"]
    (learner,) = pod["containers"]
    given = {variable["name"]: variable.get("value", "0") for variable in learner["env"]}
    nodes = nodes_of(given)
    assert nodes == Nodes(number=2, rank=0, address=f"bapo-learner-0.{pod['subdomain']}")
    services = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "Service"}
    assert services[pod["subdomain"]]["clusterIP"] == "None"
    labels = labels_of(job["template"])
    assert selects(services[pod["subdomain"]]["selector"], labels)
    policies = [each["spec"] for each in found if each["kind"] == "NetworkPolicy"]
    let_in = [rule for each in policies if selects(each["podSelector"], labels) for rule in each.get("ingress", [])]
    assert any("ports" not in rule and selects(peer["podSelector"], labels) for rule in let_in for peer in rule["from"])
    assert not learner.keys() & {"livenessProbe", "startupProbe"}, "only rank 0 answers them"


def test_agents_reach_the_address_of_agents_and_nothing_else(tmp_path: Path, secrets: dict[str, set[str]]) -> None:
    found = with_components(tmp_path, "agents", "agents-ingress")
    assert [complaints(manifest) for manifest in found if is_core(manifest) and complaints(manifest)] == []
    (template,) = [each for where, each in pods(found) if where == "Deployment/bapo-agents"]
    labels, (agents,) = labels_of(template), template["spec"]["containers"]
    assert agents["securityContext"]["readOnlyRootFilesystem"]
    assert "token" in secrets["bapo-agent"]
    opened = [
        (policy["metadata"]["name"], port["port"])
        for policy in found
        if policy["kind"] == "NetworkPolicy"
        for rule in policy["spec"].get("ingress", [])
        for peer in rule.get("from", [])
        if "podSelector" in peer and selects(peer["podSelector"], labels)
        for port in rule.get("ports", [])
    ]
    assert opened == [("bapo-agents", 8720)]
    (service,) = [each for each in found if each["kind"] == "Service" and each["metadata"]["name"] == "bapo-agents"]
    assert f"--url=http://bapo-agents:{service['spec']['ports'][0]['port']}" in agents["args"]
    assert len([where for where, each in pods(found) if selects(service["spec"]["selector"], labels_of(each))]) == 1
    (ingress,) = [each["spec"] for each in found if each["kind"] == "Ingress"]
    assert ingress["tls"][0]["hosts"] == [rule["host"] for rule in ingress["rules"]]


PARAMETERS = {"1.5b": 1.78e9, "8b": 8.19e9}
"""DeepSeek-R1-Distill-Qwen-1.5B, Qwen3-8B."""
GPU_BYTES = 79 << 30
"""Of a GPU of 80 GB, as CUDA counts."""


@pytest.mark.parametrize("size", PARAMETERS)
def test_sizes_are_at_least_what_the_parameters_need(size: str, tmp_path: Path) -> None:
    found = with_components(tmp_path, f"sizes/{size}")
    assert [complaints(manifest) for manifest in found if is_core(manifest) and complaints(manifest)] == []
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in found}
    settings = [str(K8S / "overlays/gpu/run.toml"), str(K8S / "components/sizes" / size / "size.toml")]
    config, parameters = load_config(settings, []), int(PARAMETERS[size])
    files = by_name["ConfigMap", "bapo-config"]["data"].keys()
    (create,) = by_name["Job", "bapo-create"]["spec"]["template"]["spec"]["containers"]
    assert [arg for arg in create["args"] if arg.endswith(".toml")] == [
        f"/bapo/config/{name}" for name in sorted(files)
    ]

    job = by_name["Job", "bapo-learner"]["spec"]
    (learner,), (wait, doctor) = job["template"]["spec"]["containers"], job["template"]["spec"]["initContainers"]
    assert (wait["name"], doctor["name"]) == ("wait", "doctor")
    assert doctor["resources"] == learner["resources"]
    limits = learner["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == config.learner.num_ranks
    (shm,) = [each["emptyDir"]["sizeLimit"] for each in job["template"]["spec"]["volumes"] if each["name"] == "shm"]
    assert gib(limits["memory"]) >= learner_gib(config, parameters) + gib(shm)
    assert learner_bytes(config, parameters) / config.learner.num_ranks < 0.6 * GPU_BYTES, "activations come on top"

    worker = by_name["RayCluster", "bapo-ray"]["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    (engine,), (doctor,) = worker["containers"], worker["initContainers"]
    assert doctor["resources"] == engine["resources"]
    limits, gpus = engine["resources"]["limits"], config.rollout.worker_resources["GPU"]
    assert (float(limits["nvidia.com/gpu"]), parallelism_problem(config.rollout)) == (gpus, "")
    assert engine_bytes(config, parameters) / gpus < 0.5 * GPU_BYTES, "the KV cache comes on top"
    assert gib(limits["memory"]) * GIB >= engine_bytes(config, parameters), "weights that are read"
    for name, need in {"outputs": run_bytes(config, parameters), "models": 2 * parameters}.items():
        storage = by_name["PersistentVolumeClaim", f"bapo-{name}"]["spec"]["resources"]["requests"]["storage"]
        assert gib(storage) * GIB >= need, name


def gib(quantity: str) -> float:
    """Of Kubernetes' quantity, `512Gi`."""
    return float(quantity.removesuffix("Gi"))


def test_keda_scales_the_nodes_within_the_bounds_of_the_fleet_on_a_metric_that_is_exported() -> None:
    scaled, config = of_kind("keda", "ScaledObject")["bapo-ray-node"]["spec"], config_of("keda")
    target = of_kind("keda", scaled["scaleTargetRef"]["kind"])[scaled["scaleTargetRef"]["name"]]
    assert "replicas" not in target["spec"]
    assert 1 <= scaled["minReplicaCount"] <= scaled["fallback"]["replicas"] <= scaled["maxReplicaCount"]
    assert scaled["minReplicaCount"] == config.autoscaling.min_workers
    assert scaled["maxReplicaCount"] == (config.autoscaling.max_workers or config.rollout.max_workers)
    assert config.autoscaling.actuator == "external"
    (trigger,) = scaled["triggers"]
    (metric,) = re.findall(r"bapo_\w+", trigger["metadata"]["query"])
    sources = [path.read_text() for path in (REPOSITORY / "bapo").rglob("*.py")]
    assert any(f'"{metric}"' in source for source in sources)
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")


# -- schemas


VERSION = "1.36"


def complaints(manifest: Manifest) -> list[str]:
    """What is wrong with one manifest."""
    key = (manifest["apiVersion"], manifest["kind"])
    if "." in key[0].partition("/")[0] and not key[0].partition("/")[0].endswith(".k8s.io"):
        return [
            f"{'.'.join(map(str, error.path))}: {error.message}"
            for error in custom_schemas()[key].iter_errors(manifest)
        ]
    try:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{error.path}: {error.message}"]
    return []


def is_core(manifest: Manifest) -> bool:
    group = manifest["apiVersion"].rpartition("/")[0]
    return "." not in group or group.endswith(".k8s.io")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_core_kinds_are_what_kubernetes_takes(overlay: str) -> None:
    wrong = {found["metadata"]["name"]: complaints(found) for found in build(overlay) if is_core(found)}
    assert {name: what for name, what in wrong.items() if what} == {}
    assert len(wrong) > 10


def test_the_pod_to_copy_with_is_what_kubernetes_takes() -> None:
    (pod,) = yaml.safe_load_all((K8S / "copy.yaml").read_text())
    assert complaints(pod) == []


@pytest.mark.parametrize("overlay", ["gpu", "monitoring", "gpu-monitoring", "keda"])
def test_custom_resources_are_what_their_operators_take(overlay: str) -> None:
    custom = [found for found in build(overlay) if not is_core(found)]
    assert custom
    assert {found["metadata"]["name"]: what for found in custom if (what := complaints(found))} == {}

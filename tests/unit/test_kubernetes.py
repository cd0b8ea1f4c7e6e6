"""What no schema of Kubernetes can know: manifests agree with each other and with our code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import bapo
from bapo.config.load import load_config
from bapo.config.tree import Config
from tests.manifests import K8S, OVERLAYS, REPOSITORY, Manifest, build, containers, of_kind, pods

PORTS = {
    "bapo-buffer": Config().buffer.port,
    "bapo-rollout": Config().rollout.port,
    "bapo-learner": Config().learner.port,
    "bapo-scheduler": Config().scheduler.port,
    "bapo-evaluator": Config().evaluation.port,
    "bapo-dashboard": Config().dashboard.port,
}
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


SAMPLES = {"cpu-demo": "bapo-rollout", "keda": "bapo-ray-node", "gpu": "bapo-ray-worker"}
"""Label of the pods in which engines sample and verifiers grade."""


@pytest.mark.parametrize("overlay", SAMPLES)
def test_what_killed_verifiers_leave_is_waited_for(overlay: str) -> None:
    """Process 1 of such a container is a rollout server or Ray, which wait for their own children alone: each verifier
    that is killed would leave what it had started as zombies, until the pod may have no further process."""
    found = [
        template["spec"].get("shareProcessNamespace", False)
        for _, template in pods(build(overlay))
        if template["metadata"]["labels"]["app.kubernetes.io/name"] == SAMPLES[overlay]
    ]
    assert found == [True]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_namespace_refuses_pods_that_are_not(overlay: str) -> None:
    labels = of_kind(overlay, "Namespace")["bapo"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {found["metadata"].get("namespace", "bapo") for found in build(overlay)} == {"bapo"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_are_those_of_the_code(overlay: str) -> None:
    seen = set()
    for _, template in pods(build(overlay)):
        name = labels_of(template)["app.kubernetes.io/name"]
        if name in PORTS:
            assert PORTS[name] in ports_by_name(template).values(), name
            seen.add(name)
        for each in template["spec"]["containers"]:
            for argument in each.get("args", []):
                for port in re.findall(r"--port=(\d+)", argument):
                    assert int(port) in (*PORTS.values(), 6379)
                for host, port in re.findall(r"http://([a-z-]+):(\d+)", argument):
                    assert PORTS[host] == int(port), argument
    assert seen == PORTS.keys()


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
def test_every_selector_selects_something(overlay: str) -> None:
    templates = [labels_of(template) for _, template in pods(build(overlay))]
    services = [
        found["metadata"]["labels"] for found in of_kind(overlay, "Service").values() if "labels" in found["metadata"]
    ]
    for found in build(overlay):
        spec, name = found.get("spec", {}), f"{found['kind']}/{found['metadata']['name']}"
        if found["kind"] in ("PodDisruptionBudget", "PodMonitor"):
            assert any(selects(spec["selector"], labels) for labels in templates), name
        if found["kind"] == "ServiceMonitor":
            assert any(selects(spec["selector"], labels) for labels in services), name
        if found["kind"] == "NetworkPolicy":
            assert any(selects(spec["podSelector"], labels) for labels in templates), name
            for rule in spec.get("ingress", []):
                inside = [peer for peer in rule["from"] if "namespaceSelector" not in peer]
                assert all(any(selects(p["podSelector"], labels) for labels in templates) for p in inside), name
        if found["kind"] in ("Deployment", "StatefulSet"):
            assert selects(spec["selector"], spec["template"]["metadata"]["labels"]), name


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


@pytest.mark.parametrize("overlay", ["monitoring", "gpu-monitoring", "keda"])
def test_monitors_name_ports_that_are_there(overlay: str) -> None:
    services = of_kind(overlay, "Service")
    assert of_kind(overlay, "ServiceMonitor").keys() | of_kind(overlay, "PodMonitor").keys() == PORTS.keys()
    for name, monitor in of_kind(overlay, "ServiceMonitor").items():
        assert {e["port"] for e in monitor["spec"]["endpoints"]} <= {p["name"] for p in services[name]["spec"]["ports"]}
    for monitor in of_kind(overlay, "PodMonitor").values():
        selector = monitor["spec"]["selector"]
        for template in (t for _, t in pods(build(overlay)) if selects(selector, labels_of(t))):
            assert {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]} <= ports_by_name(template).keys()
    allowed = {
        port["port"] for port in of_kind(overlay, "NetworkPolicy")["bapo-metrics"]["spec"]["ingress"][0]["ports"]
    }
    assert allowed == set(PORTS.values())


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
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bapo.cli "$@"\n')
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
def test_a_pod_holds_its_own_token_alone(overlay: str) -> None:
    own = {
        "bapo-learner": "learner",
        "bapo-scheduler": "scheduler",
        "bapo-evaluator": "evaluator",
        "bapo-rollout": "worker",
        "bapo-dashboard": "viewer",
    }
    for where, template in pods(build(overlay)):
        name = labels_of(template)["app.kubernetes.io/name"]
        held = {v["secret"]["secretName"] for v in template["spec"].get("volumes", []) if "secret" in v}
        allowed = (
            {"bapo-accepted", "bapo-redis"} if name == "bapo-buffer" else {"bapo-accepted", f"bapo-{own.get(name)}"}
        )
        assert held <= ({"bapo-redis-acl"} if name == "bapo-redis" else allowed), where


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_are_of_this_version_and_ours_are_the_same_everywhere(overlay: str) -> None:
    by_name: dict[str, set[str]] = {}
    for _, template in pods(build(overlay)):
        for each in containers(template):
            name, _, tag = each["image"].partition(":")
            by_name.setdefault(name, set()).add(tag)
    assert by_name.pop("redis") == {"7.4.2-bookworm"}
    assert set(map(frozenset, by_name.values())) == {frozenset({bapo.__version__})}
    ending = "-gpu" if overlay.startswith("gpu") else ""
    assert by_name.keys() == {"bapo-buffer", "bapo-services", f"bapo-learner{ending}", f"bapo-rollout{ending}"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_buffer_waits_for_redis_as_long_as_its_start_may_take(overlay: str) -> None:
    """One that ended before would be started again after ever longer pauses, up to five minutes."""
    (buffer,) = containers(of_kind(overlay, "Deployment")["bapo-buffer"]["spec"]["template"])[-1:]
    probe = buffer["startupProbe"]
    (waits,) = (float(arg.partition("=")[2]) for arg in buffer["args"] if arg.startswith("--redis-timeout-s="))
    assert 300 < waits < probe["periodSeconds"] * probe["failureThreshold"]


def test_redis_is_the_same_as_in_compose() -> None:
    compose = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]["redis"]
    container = of_kind("cpu-demo", "StatefulSet")["bapo-redis"]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == compose["image"]
    plain = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", compose["command"])
    assert set(re.findall(r"--[a-z-]+", " ".join(container["args"]))) - {"--dir"} == set(
        re.findall(r"--[a-z-]+", plain)
    )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_configuration_is_ours_and_leads_to_the_buffer(overlay: str) -> None:
    built = of_kind(overlay, "ConfigMap")["bapo-config"]["data"]["run.toml"]
    assert tomllib.loads(built)
    config = config_of(overlay)
    assert config.buffer.url == "http://bapo-buffer:8700"
    ports = (config.buffer, config.rollout, config.learner, config.scheduler, config.evaluation, config.dashboard)
    assert [section.port for section in ports] == list(PORTS.values())


@pytest.mark.parametrize(
    ("overlay", "more"), [("cpu-demo", {"buffer"}), ("keda", {"buffer", "autoscaling", "rollout"})]
)
def test_the_demo_is_the_demo(overlay: str, more: set[str]) -> None:
    here = tomllib.loads((K8S / "overlays" / overlay / "run.toml").read_text())
    demo = tomllib.loads((REPOSITORY / "deploy" / "configs" / "demo.toml").read_text())
    assert {key for key in here if here[key] != demo.get(key)} == more
    assert {key: value for key, value in here["rollout"].items() if key != "host"} == demo["rollout"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_commands_and_their_flags_exist(overlay: str) -> None:
    common = (REPOSITORY / "bapo" / "process.py").read_text()
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


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_variables_of_ours_are_read_by_the_code(overlay: str) -> None:
    code = "\n".join(
        path.read_text()
        for package in ("bapo", "buffer_service", "rollout_server", "learner", "services")
        for path in (REPOSITORY / package).rglob("*.py")
    )
    for where, template in pods(build(overlay)):
        for each in containers(template):
            for variable in each.get("env", []):
                name = variable["name"]
                assert not name.startswith("BAPO_") or f'"{name}"' in code, f"{where}: {name}"


def ray_cluster() -> dict[str, Any]:
    return dict(of_kind("gpu", "RayCluster")["bapo-ray"]["spec"])


def test_the_worker_group_is_between_its_bounds_which_are_the_fleets() -> None:
    """No CRD says this: KubeRay takes a minimum above the maximum and then does nothing."""
    (group,), config = ray_cluster()["workerGroupSpecs"], config_of("gpu")
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert group["minReplicas"] == config.autoscaling.min_workers
    assert group["maxReplicas"] == (config.autoscaling.max_workers or config.rollout.max_workers)
    assert config.autoscaling.actuator == "fleet"


def test_the_ray_cluster_runs_the_ray_that_is_installed_and_holds_one_worker_per_pod() -> None:
    cluster = ray_cluster()
    pins = (REPOSITORY / "requirements" / "gpu.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pins
    assert config_of("gpu").rollout.worker_resources == {"GPU": 1}
    (worker,) = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
    head = cluster["headGroupSpec"]
    assert (head["rayStartParams"]["num-cpus"], head["rayStartParams"]["num-gpus"]) == ("0", "0")
    images = {
        each["image"]
        for template in (head["template"], cluster["workerGroupSpecs"][0]["template"])
        for each in containers(template)
    }
    assert len(images) == 1


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


def test_the_mixture_of_jobs_and_services_matches_what_ends_by_itself() -> None:
    assert of_kind("cpu-demo", "Job").keys() == {"bapo-create", "bapo-learner", "bapo-scheduler", "bapo-evaluator"}
    for name, job in of_kind("cpu-demo", "Job").items():
        if name != "bapo-create":
            fail = job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]
            assert (fail["containerName"], fail["values"]) == (name.removeprefix("bapo-"), [2, 4])


def test_the_pod_to_copy_with_fills_what_the_run_reads() -> None:
    (pod,) = yaml.safe_load_all((K8S / "copy.yaml").read_text())
    learner = of_kind("gpu", "Job")["bapo-learner"]["spec"]["template"]["spec"]
    assert pod["spec"]["securityContext"] == learner["securityContext"]
    (copy,), (reader,) = pod["spec"]["containers"], learner["containers"]
    assert copy["securityContext"] == reader["securityContext"]
    assert copy["image"] == f"bapo-buffer:{bapo.__version__}"
    assert claims_at(pod["spec"]).items() <= claims_at(learner).items()
    folder, _, _ = config_of("gpu").model.path.rpartition("/")
    assert claims_at(pod["spec"])[folder] == "bapo-models"
    assert not any(mount.get("readOnly") for mount in copy["volumeMounts"])


def claims_at(spec: Manifest) -> dict[str, str]:
    """Path in the first container -> claim."""
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    mounts = spec["containers"][0]["volumeMounts"]
    return {mount["mountPath"]: claims[mount["name"]] for mount in mounts if mount["name"] in claims}


def test_alerts_are_those_of_prometheus() -> None:
    rule = yaml.safe_load((K8S / "components" / "monitoring" / "rules.yaml").read_text())
    plain = yaml.safe_load(Path(REPOSITORY / "deploy" / "prometheus" / "rules.yml").read_text())
    assert rule["spec"] == plain

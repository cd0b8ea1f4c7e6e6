"""Kubernetes manifests as kubectl builds them, and strict schemas for them.

Core kinds: kubernetes-validate, which carries the schemas. Custom resources: the CRDs in the folder that BAPO_TEST_CRDS
names (KubeRay, Prometheus operator, KEDA, one file each), with every unknown key refused.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

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

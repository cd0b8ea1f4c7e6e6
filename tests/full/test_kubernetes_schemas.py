"""Every overlay builds, and an API server of today would take each of its manifests; wrong ones are found."""

from __future__ import annotations

import kubernetes_validate
import pytest
import yaml

from tests.support.manifests import K8S, OVERLAYS, Manifest, build, custom_schemas

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

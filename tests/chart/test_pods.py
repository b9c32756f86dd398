"""The pods: what they may do, what they claim, when they are ready, how they end."""

from __future__ import annotations

import os
from math import ceil

import helm_python
import pytest

from deploy.settings import set_ray_environment
from tests.support.chart.rendering import CI_VALUES, Object, Rendered, render, render_ci
from tests.support.chart.schemas import check


def containers(rendered: Rendered) -> dict[str, Object]:
    return {role: template["spec"]["containers"][0] for role, template in rendered.pod_templates.items()}


def environment(container: Object) -> dict[str, Object]:
    names = [entry["name"] for entry in container["env"]]
    assert len(names) == len(set(names))
    return {entry["name"]: entry for entry in container["env"]}


def test_no_process_runs_as_root_or_writes_to_its_image(rendered: Rendered) -> None:
    specs = [template["spec"] for template in rendered.pod_templates.values()] + [rendered.one("Pod")["spec"]]
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}


def test_the_user_of_a_namespace_on_openshift_is_a_whole_number() -> None:
    found = render({"pods": {"userId": 1000660000}})
    for template in (*found.pod_templates.values(), found.one("Pod")):
        users = [value for key, value in template["spec"]["securityContext"].items() if key in ("runAsUser", "fsGroup")]
        assert users and all(type(user) is int and user == 1000660000 for user in users)


def test_a_variable_of_the_values_replaces_that_of_the_chart_and_of_all_pods() -> None:
    """KubeRay's definition refuses a name that is there twice."""
    own: Object = {"name": "RAY_SERVE_PROXY_USE_GRPC", "value": "0"}
    shared: list[Object] = [{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "LANG", "value": "C"}]
    found = render({"pods": {"env": shared}, "workers": {"target": {"env": [own, {"name": "LANG", "value": "fr"}]}}})
    for role, container in containers(found).items():
        values = {name: entry.get("value") for name, entry in environment(container).items()}
        chosen = ("0", "fr") if role == "target" else ("1", "C")
        assert (values["RAY_SERVE_PROXY_USE_GRPC"], values["LANG"], values["NCCL_DEBUG"]) == (*chosen, "WARN")


def test_ray_and_the_caches_have_places_to_write_to(rendered: Rendered) -> None:
    for template in rendered.pod_templates.values():
        mounts = {mount["mountPath"]: mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
        assert set(mounts) >= {"/tmp", "/dev/shm", "/home/pilotfish/.cache", "/models"}  # noqa: S108
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"  # noqa: S108


def test_compiled_code_lies_in_a_volume_of_the_pods_own(rendered: Rendered) -> None:
    for template in rendered.pod_templates.values():
        container = template["spec"]["containers"][0]
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        values = environment(container)
        for name in ("PILOTFISH_CODE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
            mount = max((path for path in mounts if values[name]["value"].startswith(f"{path}/")), key=len)
            assert "emptyDir" in mounts[mount], name


def test_requests_equal_limits_and_gpus_are_claimed_in_both(rendered: Rendered) -> None:
    for container in containers(rendered).values():
        assert container["resources"]["requests"] == container["resources"]["limits"]
    if "target" in containers(render_ci("two-by-eight")):
        claims = containers(render_ci("two-by-eight"))
        assert claims["target"]["resources"]["limits"]["nvidia.com/gpu"] == "4"
        assert claims["draft"]["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert "nvidia.com/gpu" not in claims["ingress"]["resources"]["limits"]


def test_the_head_offers_no_cores_to_replicas(rendered: Rendered) -> None:
    assert rendered.cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_rays_memory_monitor_has_the_threshold_of_the_settings_and_spares_the_controller() -> None:
    chosen: list[tuple[Object, str | None]] = [
        ({}, "0.95"),
        ({"settings": {"cluster": {"memory_threshold": 0.8}}}, "0.8"),
        ({"settings": {"cluster": {"memory_threshold": 1}}}, None),
    ]
    for values, threshold in chosen:
        for role, container in containers(render(values)).items():
            variables = environment(container)
            expected = None if role == "head" else threshold  # Serve's controller runs on the head
            assert variables.get("RAY_memory_usage_threshold", {}).get("value") == expected
            assert (variables["RAY_memory_monitor_refresh_ms"]["value"] == "0") is (expected is None)
            assert variables["RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"]["value"] == "deploy.ray.controller:started"


def test_ray_has_the_environment_that_pilotfish_serve_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve then replaces a frozen replica at once, and answers pass its proxy at half the cost."""
    expected: dict[str, str] = {}
    with monkeypatch.context() as patched:
        patched.setattr(os, "environ", expected)
        set_ray_environment()
    assert "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS" in expected
    for container in containers(render()).values():
        variables = environment(container)
        assert {name: variables.get(name, {}).get("value") for name in expected} == expected


def test_every_group_has_the_ray_resource_that_replicas_of_its_role_ask_for(rendered: Rendered) -> None:
    (application,) = rendered.serve_config["applications"]
    settings = application["args"]
    asked = {"target": settings["target"]["node_resource"], "ingress": settings["server"]["ingress_node_resource"]}
    groups = {group["groupName"] for group in rendered.cluster["workerGroupSpecs"]}
    assert settings["draft"]["node_resource"] == f"pilotfish-{'draft' if 'draft' in groups else 'ingress'}"
    for group in rendered.cluster["workerGroupSpecs"]:
        resource = asked.get(group["groupName"], settings["draft"]["node_resource"])
        assert group["resources"] == {resource: "1"}
        assert group["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == group["groupName"]


def test_selectors_tolerations_and_spread_belong_to_a_group() -> None:
    templates = render_ci("two-by-eight").pod_templates
    target, ingress = templates["target"]["spec"], templates["ingress"]["spec"]
    assert target["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert target["tolerations"][0]["key"] == "nvidia.com/gpu" and target["runtimeClassName"] == "nvidia"
    assert "tolerations" not in ingress and "nodeSelector" not in ingress
    (spread,) = ingress["topologySpreadConstraints"]
    assert spread["topologyKey"] == "topology.kubernetes.io/zone"
    assert spread["labelSelector"]["matchLabels"]["pilotfish-group"] == "ingress"


def test_rays_token_comes_from_the_secret_that_kuberay_reads(rendered: Rendered) -> None:
    options = rendered.cluster["authOptions"]
    assert options["mode"] == "token"
    for container in containers(rendered).values():
        variables = environment(container)
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        secret = variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert secret == {"name": options["secretName"], "key": "auth_token"}


def test_tokens_are_in_secrets_only() -> None:
    for name in CI_VALUES:
        found = render_ci(name)
        drawn = {one["metadata"]["name"]: one["data"] for one in found.of_kind("Secret")}
        assert len(drawn) == (0 if name == "two-by-eight" else 2)
        for data in drawn.values():
            (value,) = data.values()
            assert len(value) >= 64
            rest = [one for one in found.objects if one["kind"] != "Secret"]
            assert value not in str(rest)
        for container in containers(found).values():
            for entry in container["env"]:
                assert not entry["name"].endswith("TOKEN") or "secretKeyRef" in entry["valueFrom"]


def test_drawn_tokens_differ_between_installations() -> None:
    first, second = (render().one("Secret", "-cluster")["data"] for _ in range(2))
    assert first != second


def test_the_token_of_the_hub_is_given_only_where_a_secret_is_named() -> None:
    assert "HF_TOKEN" not in environment(containers(render())["target"])
    entry = environment(containers(render_ci("two-by-eight"))["target"])["HF_TOKEN"]
    assert entry["valueFrom"]["secretKeyRef"] == {"name": "hugging-face", "key": "token"}


def test_ingress_pods_are_ready_when_the_api_is_and_all_live_as_rays_node_does(rendered: Rendered) -> None:
    for role, container in containers(rendered).items():
        assert container["livenessProbe"]["httpGet"] == {"path": "/api/local_raylet_healthz", "port": 52365}
        ready = container["readinessProbe"]["httpGet"]
        assert ready["path"] == ("/ready" if role == "ingress" else "/api/local_raylet_healthz")


def test_a_pod_ends_after_its_requests(rendered: Rendered) -> None:
    (application,) = rendered.serve_config["applications"]
    drain = application["args"]["server"]["drain_timeout_seconds"]
    assert rendered.one("RayService")["spec"]["rayClusterDeletionDelaySeconds"] > drain
    for role, template in rendered.pod_templates.items():
        spec = template["spec"]
        assert spec["terminationGracePeriodSeconds"] > drain
        if role != "head":
            assert spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(drain)]


def test_only_the_head_may_call_kubernetes_and_only_to_scale() -> None:
    for name in CI_VALUES:
        found = render_ci(name)
        for role, template in found.pod_templates.items():
            expected = role == "head" and name == "two-by-eight"
            assert template["spec"]["automountServiceAccountToken"] is expected


def test_groups_scale_between_their_bounds_with_rays_autoscaler() -> None:
    cluster = render_ci("two-by-eight").cluster
    assert cluster["enableInTreeAutoscaling"] and cluster["autoscalerOptions"]["version"] == "v2"
    bounds = {one["groupName"]: (one["minReplicas"], one["maxReplicas"]) for one in cluster["workerGroupSpecs"]}
    assert bounds == {"target": (1, 2), "draft": (2, 2), "ingress": (2, 6)}
    fixed = render({"workers": {"target": {"replicas": 2, "minReplicas": 1, "maxReplicas": 5}}}).cluster
    assert {(one["minReplicas"], one["maxReplicas"]) for one in fixed["workerGroupSpecs"]} == {(2, 2), (1, 1)}


def test_disruptions_leave_all_but_one_pod_of_a_group() -> None:
    found = render({"workers": {"ingress": {"replicas": 3}, "target": {"replicas": 2, "minAvailable": 2}}})
    budgets = {one["metadata"]["name"]: one["spec"] for one in found.of_kind("PodDisruptionBudget")}
    assert {name: spec["minAvailable"] for name, spec in budgets.items()} == {
        "demo-pilotfish-ingress": 2,
        "demo-pilotfish-target": 2,
    }
    assert not render().of_kind("PodDisruptionBudget")  # one pod each: a budget would block every node drain


def test_the_control_store_may_outlive_the_head() -> None:
    assert "gcsFaultToleranceOptions" not in render().cluster
    assert render_ci("two-by-eight").cluster["gcsFaultToleranceOptions"] == {
        "backend": "redis",
        "redisAddress": "redis:6379",
        "redisUsername": {"value": "ray"},
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
    }
    address = {"enabled": True, "redisAddress": "[fd00::1]:6379"}
    options = render({"gcsFaultTolerance": address}).cluster["gcsFaultToleranceOptions"]
    assert options == {"backend": "redis", "redisAddress": "[fd00::1]:6379"}
    volume = {"enabled": True, "backend": "rocksdb", "storage": {"size": "1Gi"}}
    assert render({"gcsFaultTolerance": volume}).cluster["gcsFaultToleranceOptions"] == {
        "backend": "rocksdb",
        "storage": {"size": "1Gi"},
    }


def test_two_clusters_never_share_the_name_under_which_the_state_is_stored() -> None:
    named = {"gcsFaultTolerance": {"enabled": True, "externalStorageNamespace": "pilotfish"}}
    with pytest.raises(helm_python.HelmError, match="two clusters run at once and must not share it"):
        render(named)
    options = render(named | {"serve": {"upgrade": "None"}}).cluster["gcsFaultToleranceOptions"]
    assert options["externalStorageNamespace"] == "pilotfish"


def test_an_upgrade_of_two_by_eight_needs_no_second_set_of_gpus() -> None:
    found = render_ci("two-by-eight")
    strategy = found.one("RayService")["spec"]["upgradeStrategy"]
    surge = strategy["clusterUpgradeOptions"]["maxSurgePercent"] / 100

    def gpus(capacity: float) -> int:
        """GPUs of a cluster at a share of its capacity. Serve rounds its replicas up."""
        return sum(
            ceil(group["maxReplicas"] * capacity) * int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
            for group in found.cluster["workerGroupSpecs"]
            for container in group["template"]["spec"]["containers"]
        )

    assert strategy["type"] == "NewClusterWithIncrementalUpgrade"
    assert gpus(1.0) + gpus(surge) <= 16
    assert gpus(1.0) * 2 > 16, "a second cluster of the same size would not fit"
    drafters = found.pod_templates["draft"]["spec"]["affinity"]["podAffinity"]  # GPUs of one node stay together
    (term,) = drafters["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"].items() <= found.pod_templates["draft"]["metadata"]["labels"].items()


def test_an_image_may_be_named_by_digest_and_per_group() -> None:
    digest = f"sha256:{'ab' * 32}"
    workers = {"target": {"image": {"tag": "1-cuda"}}, "ingress": {"image": {"repository": "edge", "tag": "2"}}}
    found = render({"image": {"repository": "r/pilotfish", "digest": digest}, "workers": workers})
    images = {role: container["image"] for role, container in containers(found).items()}
    assert images == {"head": f"r/pilotfish@{digest}", "target": "r/pilotfish:1-cuda", "ingress": "edge:2"}
    assert found.one("Pod")["spec"]["containers"][0]["image"] == f"r/pilotfish@{digest}"
    one = render({"workers": {"target": {"image": {"digest": digest}}}})
    assert containers(one)["target"]["image"] == f"pilotfish@{digest}"
    with pytest.raises(helm_python.HelmError, match="image/digest"):
        render({"image": {"digest": "sha256:ab"}})


def test_a_group_has_containers_volumes_labels_and_annotations_of_its_own() -> None:
    sidecar: Object = {"name": "logs", "image": "fluent-bit:4"}
    first: Object = {"name": "fetch", "image": "fetch:1"}
    own = {
        "sidecars": [sidecar],
        "initContainers": [first],
        "labels": {"team": "a"},
        "annotations": {"note": "own"},
        "volumes": [{"name": "logs", "emptyDir": {}}],
        "volumeMounts": [{"name": "logs", "mountPath": "/logs"}],
        "tolerations": [{"key": "spot", "operator": "Exists"}],
    }
    shared = {"labels": {"team": "all", "app": "x"}, "annotations": {"note": "all"}}
    found = render({"pods": shared, "head": own, "workers": {"target": own}})
    for role in ("head", "target"):
        template = found.pod_templates[role]
        spec, (ray, beside) = template["spec"], template["spec"]["containers"]
        assert (spec["initContainers"], beside, spec["tolerations"]) == ([first], sidecar, own["tolerations"])
        assert template["metadata"]["labels"].items() >= {"team": "a", "app": "x"}.items()
        assert template["metadata"]["annotations"] == {"note": "own"}
        assert own["volumes"][0] in spec["volumes"] and own["volumeMounts"][0] in ray["volumeMounts"]
    other = found.pod_templates["ingress"]
    assert len(other["spec"]["containers"]) == 1 and "initContainers" not in other["spec"]
    assert other["metadata"]["annotations"] == {"note": "all"} and other["metadata"]["labels"]["team"] == "all"
    check(found.one("RayService"))


def test_a_slow_start_gets_its_time_before_liveness_counts() -> None:
    found = render({"probes": {"startup": {"periodSeconds": 10, "failureThreshold": 90}}})
    for container in containers(found).values():
        probe = container["startupProbe"]
        assert (probe["periodSeconds"], probe["failureThreshold"]) == (10, 90)
        assert probe["httpGet"] == container["livenessProbe"]["httpGet"]
        assert "initialDelaySeconds" not in container["livenessProbe"]

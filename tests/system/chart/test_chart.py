"""What the chart renders, what it refuses, and what every rendered object must have."""

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from allpairspy import AllPairs

from helm.generate import generated
from services.gateway.settings import GatewaySettings
from shared.settings import load
from tests.system.chart.conftest import CHART, ROOT, Helm, Object, Refused, merged, of_kind, pod_specs, workloads

HUB = {"type": "huggingFace", "huggingFace": {"repository": "Qwen/Qwen3-0.6B"}}
SINGLE_CLAIM = {"model": {"source": {"type": "pvc", "pvc": {"claimName": "c", "accessMode": "ReadWriteOnce"}}}}
SWITCHES: dict[str, list[Object]] = {
    "mode": [{"worker": {"mode": "gpu"}}, {"worker": {"mode": "cpu"}}, {"worker": {"mode": "simulated"}}],
    "tp": [{}, {"parallelism": {"tp": 2}}],
    "network policy": [{}, {"networkPolicy": {"enabled": False}}],
    "monitoring": [
        {},
        {"monitoring": {"stack": {"enabled": True}}, "networkPolicy": {"monitoringFrom": [{"podSelector": {}}]}},
        {
            "monitoring": {
                "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
                "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
                "scrapeAnnotations": False,
                "dashboards": {"annotations": {"folder": "models"}},
                "stack": {"enabled": True, "grafana": {"adminSecret": "admin"}},
            }
        },
    ],
    "outside": [
        {},
        {"gateway": {"ingress": {"enabled": True, "preset": "nginx", "host": "llm.example.com", "tlsSecret": "cert"}}},
        {"gateway": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "edge"}], "hostnames": ["llm.example.com"]}}},
    ],
    "scaling": [
        {},
        {"worker": {"autoscaling": {"enabled": True, "type": "hpa"}}},
        {
            "gateway": {"autoscaling": {"enabled": True}, "pdb": {"enabled": True}},
            "worker": {"autoscaling": {"enabled": True, "prometheusAddress": "http://prometheus:9090"}},
        },
    ],
    "model": [
        {},
        {"model": {"source": {"type": "pvc", "pvc": {"claimName": "weights", "subPath": "qwen"}}}},
        {"model": {"source": {"type": "hostPath", "hostPath": {"path": "/srv/qwen"}}}},
        {"model": {"source": HUB}},
    ],
    "cache": [{}, {"worker": {"compileCache": {"enabled": True, "storageClassName": "fast"}}}],
    "secrets": [{}, {"auth": {"existingSecret": "keys"}, "tls": {"existingSecret": "cert"}, "imagePullSecrets": ["pull"]}],
    "tests": [{}, {"worker": {"replicas": 2}, "tests": {"moveEnabled": True, "keySecret": "key"}}],
    "pool": [{}, {"inferencePool": {"enabled": True, "endpointPicker": "picker"}}],
}
BARE_API: tuple[str, ...] = ()
LEADER = "leaderworkerset.sigs.k8s.io/worker-index", "0"


def matrix() -> list[Object]:
    """Renderings in which every pair of positions of two switches occurs."""
    return [merged(*positions) for positions in AllPairs(list(SWITCHES.values()))]


def check(objects: list[Object]) -> None:
    """What holds for every rendering."""
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))
    for each in objects:
        if each["apiVersion"].split("/")[0] in (
            "v1",
            "apps",
            "batch",
            "policy",
            "autoscaling",
            "networking.k8s.io",
            "rbac.authorization.k8s.io",
        ):
            kubernetes_validate.validate(each, "1.33", strict=True)
        assert each["metadata"]["namespace"] == "models"
        assert len(each["metadata"]["name"]) <= 63
    sets = (each["spec"] for each in objects if each["kind"] in ("StatefulSet", "LeaderWorkerSet"))
    templates = (claim for spec in sets for claim in spec.get("leaderWorkerTemplate", spec).get("volumeClaimTemplates", []))
    claims = {template["metadata"]["name"] for template in templates}
    for spec in pod_specs(objects):
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert "hostIPC" not in spec
        assert "hostNetwork" not in spec
        volumes = {volume["name"] for volume in spec.get("volumes", [])} | claims
        for container in spec["containers"] + spec.get("initContainers", []):
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            assert all(isinstance(variable.get("value", ""), str) for variable in container.get("env", []))
            variables = [variable["name"] for variable in container.get("env", [])]
            assert len(variables) == len(set(variables))  # else Helm 4 cannot apply it
            writable = [mount["mountPath"] for mount in container.get("volumeMounts", []) if not mount.get("readOnly")]
            for variable in container.get("env", []):
                if variable["name"].endswith(("HOME", "CACHE_DIR")):
                    assert any(Path(variable["value"]).is_relative_to(path) for path in writable), variable
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe in container:
                    assert container[probe]["httpGet"]["port"] in ports
    services = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Service"}
    for component, workload, template in workloads(objects):
        labels = template["metadata"]["labels"]
        if workload["kind"] == "LeaderWorkerSet":
            labels = {**labels, LEADER[0]: LEADER[1]}  # which its controller adds
        else:
            assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        service = services[f"trial-lockstep-{component}"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
        for monitor in (each for each in objects if each["kind"] == "PodMonitor" and each["metadata"]["name"].endswith(component)):
            assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
            assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports


def test_k8s_13_every_pair_of_switches_renders_objects_that_fit_their_schemas(helm: Helm) -> None:
    for values in matrix():
        try:
            check(helm.objects(values))
        except (AssertionError, Refused, kubernetes_validate.ValidationError) as error:
            raise AssertionError(f"{values}: {error}") from error


def test_k8s_13_groups_over_two_nodes_render_in_every_pair_of_switches_too(helm: Helm) -> None:
    others = {name: positions for name, positions in SWITCHES.items() if name not in ("mode", "tp", "scaling")}  # which nodes rule out
    for positions in AllPairs(list(others.values())):
        values = merged(*positions, {"parallelism": {"tp": 4, "nodes": 2}})
        try:
            check(helm.objects(values))
        except (AssertionError, Refused, kubernetes_validate.ValidationError) as error:
            raise AssertionError(f"{values}: {error}") from error


def test_k8s_13_lint_is_clean(helm: Helm) -> None:
    for values in ({}, *SWITCHES["mode"], *SWITCHES["scaling"], *SWITCHES["model"]):
        assert "0 chart(s) failed" in helm.run("lint", "--strict", str(CHART), values=values)


def test_kinds_that_the_cluster_does_not_know_are_left_out(helm: Helm) -> None:
    values = merged(*(positions[-1] for name, positions in SWITCHES.items() if name not in ("mode", "model")))
    kinds = {each["kind"] for each in helm.objects(values, apis=BARE_API)}
    assert not kinds & {"PodMonitor", "ScaledObject", "HTTPRoute", "InferencePool", "PrometheusRule"}
    assert {"PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute", "InferencePool"} <= {each["kind"] for each in helm.objects(values)}


@pytest.mark.parametrize(
    "values, sentence",
    [
        ({"parallelism": {"tp": 3, "nodes": 2}}, "parallelism.tp: 3 ranks do not spread evenly"),
        (
            {"parallelism": {"tp": 2}, "worker": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
            "worker.resources.limits: 1 of nvidia.com/gpu",
        ),
        ({"parallelism": {"tp": 2}, "worker": {"shm": {"enabled": False}}}, "worker.shm.enabled: false"),
        ({"worker": {"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}}, "maxSurge"),
        ({"worker": {"terminationGracePeriodSeconds": 20}}, "worker.terminationGracePeriodSeconds: 20 is less than"),
        ({"gateway": {"terminationGracePeriodSeconds": 49}}, "gateway.terminationGracePeriodSeconds: 49 is less than .* = 50"),
        ({"worker": {"autoscaling": {"enabled": True}}}, "worker.autoscaling.prometheusAddress"),
        ({"model": {"source": {"type": "pvc"}}}, "model.source.pvc.claimName"),
        (merged(SINGLE_CLAIM, {"worker": {"replicas": 2}}), "ReadWriteOnce .* 2 worker pods"),
        (
            merged(SINGLE_CLAIM, {"worker": {"autoscaling": {"enabled": True, "type": "hpa"}}}),
            "ReadWriteOnce .* 4 worker pods",
        ),
        (
            merged(SINGLE_CLAIM, {"parallelism": {"tp": 2, "nodes": 2}}),
            "ReadWriteOnce .* 2 worker pods",
        ),
        ({"model": {"source": {"type": "hostPath"}}}, "model.source.hostPath.path"),
        ({"model": {"source": {"type": "huggingFace"}}}, "model.source.huggingFace.repository"),
        ({"gateway": {"httpRoute": {"enabled": True}}}, "gateway.httpRoute.parentRefs"),
        ({"gateway": {"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": None}}}}, "gateway.autoscaling.enabled"),
        ({"gateway": {"autoscaling": {"enabled": True, "minReplicas": 11}}}, "gateway.autoscaling.minReplicas"),
        ({"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker"),
        ({"tests": {"moveEnabled": True}}, "tests.moveEnabled"),
        ({"parallelism": {"tp": 2, "nodes": 2}, "worker": {"mode": "simulated"}}, "parallelism.nodes: 2"),
        ({"worker": {"updateStrategy": {"type": "Recreate"}}}, "worker.updateStrategy.type: Recreate is none"),
        ({"fullnameOverride": "My_App"}, "fullnameOverride: objects would be called My_App-gateway"),
        ({"commonLabels": {"app.kubernetes.io/instance": "a"}}, "app.kubernetes.io/instance is the chart's own"),
        ({"worker": {"podLabels": {"app.kubernetes.io/component": "a"}}}, "app.kubernetes.io/component is the chart's own"),
        ({"gateway": {"service": {"nodePort": 30080}}}, "gateway.service.nodePort"),
        ({"enabled": False}, "enabled: false is for a chart that this one is part of"),
        ({"worker": {"settings": {"port": 7300}}}, "worker.settings.port"),
        ({"scheduler": {"settings": {"ADMIN_PORT": 9}}}, "scheduler.settings.ADMIN_PORT"),
        ({"gateway": {"settings": {"drain_s": 300}}}, "gateway.settings.drain_s: set drainSeconds"),
        ({"worker": {"settings": {"tensor_parallel_size": 2}}}, "worker.settings.tensor_parallel_size: set parallelism.tp"),
        (
            {"gateway": {"serviceAccount": {"name": "a"}}, "scheduler": {"serviceAccount": {"name": "a"}}},
            "scheduler.serviceAccount.create: gateway makes a already",
        ),
    ],
)
def test_values_that_cannot_work_are_refused_with_a_sentence(helm: Helm, values: Object, sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        helm.template(values)


@pytest.mark.parametrize(
    "values, named",
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"replica": 2}}, "replica"),
        ({"gateway": {"replicas": "two"}}, "replicas"),
        ({"worker": {"mode": "tpu"}}, "mode"),
        ({"parallelism": {"tp": 0}}, "tp"),
        ({"gateway": {"extraArgs": "--port 1"}}, "extraArgs"),
        ({"scheduler": {"image": {"pullPolicy": "Sometimes"}}}, "pullPolicy"),
        ({"model": {"servedNames": []}}, "servedNames"),
        ({"gateway": {"ingress": {"path": "v1"}}}, "path"),
        ({"clusterDomain": ""}, "clusterDomain"),
        ({"gateway": {"extraEnv": [{"name": "A", "value": "1"}]}}, "extraEnv"),
        ({"worker": None}, "propert[^\n]*worker|worker is required"),
        ({"gateway": {"startupProbe": None}}, "propert[^\n]*startupProbe|startupProbe is required"),
        ({"parallelism": {"nodes": None}}, "propert[^\n]*nodes|nodes is required"),
        ({"model": {"servedNames": None}}, "propert[^\n]*servedNames|servedNames is required"),
    ],
)
def test_k8s_10_the_schema_refuses_wrong_types_and_names_them(helm: Helm, values: Object, named: str) -> None:
    with pytest.raises(Refused, match=named):
        helm.template(values)


def test_k8s_01_a_worker_has_half_an_hour_to_load(helm: Helm) -> None:
    container = of_kind(helm.objects(), "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    startup, liveness, readiness = (container[f"{name}Probe"] for name in ("startup", "liveness", "readiness"))
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 600
    assert "initialDelaySeconds" not in liveness
    assert liveness["timeoutSeconds"] > 1
    assert readiness["httpGet"]["path"] != liveness["httpGet"]["path"]
    assert readiness["failureThreshold"] * readiness["periodSeconds"] < liveness["failureThreshold"] * liveness["periodSeconds"]
    longer = helm.objects({"worker": {"startupProbe": {"failureThreshold": 720}}})
    assert of_kind(longer, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]["startupProbe"]["failureThreshold"] == 720


def test_k8s_06_ranks_of_a_pod_share_memory(helm: Helm) -> None:
    def shm(values: Object) -> list[Object]:
        spec = of_kind(helm.objects(values), "StatefulSet")["spec"]["template"]["spec"]
        assert "hostIPC" not in spec
        return [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm"]

    assert shm({}) == []
    assert shm({"parallelism": {"tp": 2}}) == [{"medium": "Memory", "sizeLimit": "2Gi"}]
    assert shm({"worker": {"shm": {"enabled": True, "sizeLimit": "5Gi"}}}) == [{"medium": "Memory", "sizeLimit": "5Gi"}]


def test_gpus_are_computed(helm: Helm) -> None:
    def limits(values: Object) -> Any:
        (worker,) = (each for name, _, each in workloads(helm.objects(values)) if name == "worker")
        return worker["spec"]["containers"][0].get("resources", {}).get("limits")

    assert limits({}) == {"nvidia.com/gpu": 1}
    assert limits({"parallelism": {"tp": 8, "nodes": 2}}) == {"nvidia.com/gpu": 4}
    assert limits({"parallelism": {"tp": 2}, "worker": {"resources": {"limits": {"memory": "64Gi"}}}}) == {
        "nvidia.com/gpu": 2,
        "memory": "64Gi",
    }
    assert limits({"worker": {"mode": "cpu"}}) is None


def test_several_nodes_are_a_leader_worker_set(helm: Helm) -> None:
    objects = helm.objects({"parallelism": {"tp": 8, "nodes": 2}, "worker": {"replicas": 3}})
    spec = of_kind(objects, "LeaderWorkerSet")["spec"]
    assert spec["replicas"] == 3
    assert spec["leaderWorkerTemplate"]["size"] == 2
    assert not [each for each in objects if each["kind"] == "StatefulSet"]
    (leader,) = spec["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
    (other,) = spec["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= other.keys()
    environments = [container.pop("env") for container in (leader, other)]
    assert other == leader
    in_both = [variable for variable in environments[0] if variable in environments[1]]
    assert [[each["valueFrom"]["fieldRef"]["fieldPath"] for each in own if each not in in_both] for own in environments] == [
        ["metadata.name"],
        ["metadata.annotations['leaderworkerset.sigs.k8s.io/leader-name']"],
    ]  # the group's name, which is its leader's
    policy = of_kind(objects, "NetworkPolicy", "worker")["spec"]
    to_each_other = {"podSelector": {"matchLabels": policy["podSelector"]["matchLabels"]}}
    assert {"from": [to_each_other]} in policy["ingress"]  # on every port: those of NCCL and gloo are the kernel's choice
    assert {"to": [to_each_other]} in policy["egress"]
    assert of_kind(objects, "Service", "worker")["spec"]["selector"][LEADER[0]] == LEADER[1]
    assert LEADER[0] not in of_kind(helm.objects({}), "Service", "worker")["spec"]["selector"]


def test_a_roll_out_waits_as_long_as_weights_take(helm: Helm) -> None:
    objects = helm.objects({"worker": {"startupProbe": {"periodSeconds": 10, "failureThreshold": 720}}})
    for component in ("gateway", "scheduler"):
        assert of_kind(objects, "Deployment", component)["spec"]["progressDeadlineSeconds"] > 7200


def test_k8s_08_a_token_stands_in_a_secret_only(helm: Helm) -> None:
    literal = "hf_verysecrettoken"
    source = merged(HUB, {"huggingFace": {"token": literal}})
    rendered = helm.template({"model": {"source": source}})
    assert literal not in rendered
    secret = of_kind([each for each in yaml.safe_load_all(rendered) if each], "Secret")
    assert list(secret["data"]) == ["HF_TOKEN"]
    (init,) = of_kind([each for each in yaml.safe_load_all(rendered) if each], "StatefulSet")["spec"]["template"]["spec"]["initContainers"]
    used = {variable["name"]: variable["valueFrom"]["secretKeyRef"] for variable in init["env"] if "valueFrom" in variable}
    assert used == {"HF_TOKEN": {"name": secret["metadata"]["name"], "key": "HF_TOKEN"}}
    own = helm.objects({"model": {"source": merged(source, {"huggingFace": {"existingSecret": "mine", "secretKey": "token"}})}})
    assert not [each for each in own if each["kind"] == "Secret"]
    (init,) = of_kind(own, "StatefulSet")["spec"]["template"]["spec"]["initContainers"]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "token"}}} in init["env"]


def test_a_download_finds_the_way_out_that_the_worker_was_given(helm: Helm) -> None:
    proxy, authorities = {"configMapRef": {"name": "proxy"}}, {"name": "authorities", "mountPath": "/etc/authorities"}
    values = {
        "model": {"source": merged(HUB, {"huggingFace": {"endpoint": "http://mirror:8080", "token": "a"}})},
        "worker": {
            "extraEnv": {"SSL_CERT_FILE": "/etc/authorities/ca.crt", "HF_TOKEN": "b"},
            "envFrom": [proxy],
            "extraVolumes": [{"name": "authorities", "configMap": {"name": "authorities"}}],
            "extraVolumeMounts": [authorities],
        },
    }
    objects = helm.objects(values)
    check(objects)
    (init,) = of_kind(objects, "StatefulSet")["spec"]["template"]["spec"]["initContainers"]
    env = {variable["name"]: variable["value"] for variable in init["env"]}
    assert env.items() >= {"SSL_CERT_FILE": "/etc/authorities/ca.crt", "HF_TOKEN": "b", "HF_ENDPOINT": "http://mirror:8080"}.items()
    assert init["envFrom"] == [proxy]
    assert authorities in init["volumeMounts"]
    assert {"port": 8080, "protocol": "TCP"} in egress_ports(objects, "worker")
    assert {"port": 443, "protocol": "TCP"} in egress_ports(helm.objects({"model": {"source": HUB}}), "worker")


def test_keys_are_mounted_from_a_secret(helm: Helm) -> None:
    keys = [{"name": "alice", "sha256": "0" * 64}]
    objects = helm.objects({"auth": {"keys": keys}})
    assert json.loads(base64.b64decode(of_kind(objects, "Secret")["data"]["keys.json"])) == {"keys": keys}
    spec = of_kind(objects, "Deployment", "gateway")["spec"]["template"]["spec"]
    assert {"name": "LOCKSTEP_GATEWAY_API_KEYS", "value": "/etc/lockstep/keys/keys.json"} in spec["containers"][0]["env"]


def test_k8s_10_values_reach_the_container_as_they_are(helm: Helm) -> None:
    given = {
        "NUMBER": 1000000,
        "YES": True,
        "OCTAL": "0123",
        "FLOAT": 1e6,
        "RATIO": 0.25,
        "EMPTY": "",
        "TEXT": 'a "quoted"\nline',
        "GONE": None,
    }
    objects = helm.objects(
        {
            "gateway": {
                "extraEnv": given,
                "extraArgs": ["--cors-origins", "a b=c"],
                "settings": {"max_requests": 1000000, "page": False},
                "nodeSelector": {"gpu": True},
                "resources": None,
                "tolerations": None,
                "affinity": {},
            }
        }
    )
    spec = of_kind(objects, "Deployment", "gateway")["spec"]["template"]["spec"]
    container = spec["containers"][0]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    expected = {
        "NUMBER": "1000000",
        "YES": "true",
        "OCTAL": "0123",
        "FLOAT": "1000000",
        "RATIO": "0.25",
        "EMPTY": "",
        "TEXT": given["TEXT"],
    }
    assert expected.items() <= env.items()
    assert "GONE" not in env
    assert env["LOCKSTEP_GATEWAY_MAX_REQUESTS"] == "1000000"
    assert env["LOCKSTEP_GATEWAY_PAGE"] == "false"
    assert container["args"] == ["--cors-origins", "a b=c"]
    assert spec["nodeSelector"] == {"gpu": "true"}
    check(objects)


def emptied(values: Object) -> Object:
    """What is empty by default, as null, which a key without anything below it is."""
    nested = {key: emptied(value) for key, value in values.items() if isinstance(value, dict) and value}
    return {key: None for key, value in values.items() if value in ({}, [], "", None)} | {
        key: value for key, value in nested.items() if value
    }


def test_k8s_10_nothing_is_as_good_as_an_empty_map_or_list(helm: Helm) -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    of_worker = {"image": {"repository": ""}, "resources": None}  # the chart completes the name
    nothing = merged(emptied(defaults), {"worker": of_worker, "gateway": {"resources": None}})
    on = {"gateway": {"ingress": {"enabled": True, "preset": "nginx"}, "pdb": {"enabled": True, "maxUnavailable": None}}}
    check(helm.objects(merged(nothing, on, {"monitoring": {"stack": {"enabled": True}}})))


def test_k8s_10_names_and_numbers_stay_what_they_are(helm: Helm) -> None:
    """A name may look like a number or a truth, and a large number must not look like a fraction."""
    values = {
        "imagePullSecrets": ["123", "registry.example.com"],
        "auth": {"existingSecret": "3"},
        "tls": {"existingSecret": "0x4"},
        "gateway": {"priorityClassName": "5", "ingress": {"enabled": True, "className": "6", "tlsSecret": "7"}},
        "scheduler": {"serviceAccount": {"name": "8"}},
        "worker": {
            "runtimeClassName": "9",
            "compileCache": {"enabled": True, "storageClassName": "10", "size": 10_000_000_000},
            "startupProbe": {"failureThreshold": 1_000_000},
            "autoscaling": {"enabled": True, "type": "hpa"},
        },
        "model": {
            "servedNames": ["a: b #c"],
            "source": merged(HUB, {"huggingFace": {"existingSecret": "true", "secretKey": "12"}}),
        },
        "tests": {"keySecret": "13", "secretKey": "14"},
        "monitoring": {"stack": {"enabled": True, "grafana": {"adminSecret": "15"}}},
        "inferencePool": {"enabled": True, "endpointPicker": "16"},
    }
    objects = helm.objects(values, namespace="2026")
    for each in objects:
        assert each["metadata"]["namespace"] == "2026"
        if each["kind"] != "InferencePool":
            kubernetes_validate.validate(each, "1.33", strict=True)
    assert of_kind(objects, "InferencePool")["spec"]["endpointPickerRef"]["name"] == "16"
    assert of_kind(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]["startupProbe"]["failureThreshold"] == 1_000_000
    secret = of_kind(helm.objects({"model": {"source": merged(HUB, {"huggingFace": {"token": "a", "secretKey": "true"}})}}), "Secret")
    kubernetes_validate.validate(secret, "1.33", strict=True)


def test_a_list_among_the_settings_is_one_to_the_program(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    origins = ["https://a.example", "https://b.example"]
    objects = helm.objects({"gateway": {"settings": {"cors_origins": origins}}})
    for variable in of_kind(objects, "Deployment", "gateway")["spec"]["template"]["spec"]["containers"][0]["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    assert load(GatewaySettings, "lockstep-gateway", []).cors_origins == origins


def test_settings_win_over_what_the_chart_takes_from_the_pod(helm: Helm) -> None:
    objects = helm.objects({"worker": {"settings": {"group": "a"}}, "scheduler": {"settings": {"advertise_host": "b"}}})
    check(objects)
    for (kind, component), variable in {
        ("StatefulSet", "worker"): {"name": "LOCKSTEP_WORKER_GROUP", "value": "a"},
        ("Deployment", "scheduler"): {"name": "LOCKSTEP_SCHEDULER_ADVERTISE_HOST", "value": "b"},
    }.items():
        assert variable in of_kind(objects, kind, component)["spec"]["template"]["spec"]["containers"][0]["env"]


def test_labels_and_annotations_of_the_user_are_on_every_object_and_win(helm: Helm) -> None:
    common = {"commonLabels": {"team": "a"}, "commonAnnotations": {"owner": "b"}}
    everything = merged(*(positions[-1] for positions in SWITCHES.values()))
    for values in (everything, {"parallelism": {"tp": 2, "nodes": 2}}):
        objects = helm.objects(merged(values, common))
        for each in objects:
            assert each["metadata"]["labels"]["team"] == "a", each["metadata"]["name"]
            assert each["metadata"]["annotations"]["owner"] == "b", each["metadata"]["name"]
        assert all(template["metadata"]["labels"]["team"] == "a" for _, _, template in workloads(objects))
    own = {
        "monitoring": {name: {"enabled": True, "labels": {"team": "c"}} for name in ("podMonitor", "prometheusRule", "dashboards")},
        "gateway": {"podLabels": {"team": "c"}, "podAnnotations": {"prometheus.io/scrape": False}},
    }
    objects = helm.objects(merged(own, common))
    changed = [each for each in objects if each["kind"] in ("PodMonitor", "PrometheusRule", "ConfigMap")]
    gateway = of_kind(objects, "Deployment", "gateway")["spec"]["template"]
    assert {each["metadata"]["labels"]["team"] for each in [*changed, gateway]} == {"c"}
    assert gateway["metadata"]["annotations"]["prometheus.io/scrape"] == "false"


def test_k8s_11_a_setting_rolls_its_pods_and_no_others(helm: Helm) -> None:
    def templates(values: Object) -> dict[str, Object]:
        return {component: template for component, _, template in workloads(helm.objects(values))}

    plain = templates({})
    changed = templates({"gateway": {"settings": {"max_requests": 7}}})
    assert {name for name in plain if plain[name] != changed[name]} == {"gateway"}
    unrelated = {"gateway": {"replicas": 3, "service": {"type": "LoadBalancer"}, "pdb": {"enabled": True}}, "commonAnnotations": {"a": "b"}}
    assert templates(unrelated) == plain
    assert helm.template() == helm.template()


def test_selectors_do_not_change_with_values(helm: Helm) -> None:
    everything = merged(*(positions[-1] for positions in SWITCHES.values()), {"commonLabels": {"team": "a"}, "image": {"tag": "9"}})
    for values in ({}, everything):
        for component, workload, _ in workloads(helm.objects(values)):
            assert workload["spec"]["selector"]["matchLabels"] == {
                "app.kubernetes.io/name": "lockstep",
                "app.kubernetes.io/instance": "trial",
                "app.kubernetes.io/component": component,
            }


def test_names_are_those_that_services_may_have(helm: Helm) -> None:
    objects = helm.objects(release="qwen3-0.6b")
    assert of_kind(objects, "Service", "gateway")["metadata"]["name"] == "qwen3-0-6b-lockstep-gateway"
    with pytest.raises(Refused, match="would be called 4b-lockstep-gateway"):
        helm.template(release="4b")


def test_scaled_workloads_name_no_replicas(helm: Helm) -> None:
    objects = helm.objects(SWITCHES["scaling"][-1])
    assert "replicas" not in of_kind(objects, "Deployment", "gateway")["spec"]
    assert "replicas" not in of_kind(objects, "StatefulSet")["spec"]


def test_schedulers_find_workers_and_leader_and_may_do_no_more(helm: Helm) -> None:
    objects = helm.objects()
    spec = of_kind(objects, "Deployment", "scheduler")["spec"]
    env = {variable["name"]: variable.get("value") for variable in spec["template"]["spec"]["containers"][0]["env"]}
    assert env["LOCKSTEP_SCHEDULER_WORKER_SERVICE"] == "models/trial-lockstep-worker"
    assert env["LOCKSTEP_SCHEDULER_LEADERSHIP"] == "lease:models/trial-lockstep-scheduler"
    assert spec["replicas"] == 2
    assert spec["template"]["spec"]["automountServiceAccountToken"] is True
    rules = of_kind(objects, "Role")["rules"]
    assert {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]} == {
        ("endpointslices", "list"),
        ("endpointslices", "watch"),
        ("leases", "create"),
        ("leases", "get"),
        ("leases", "update"),
    }
    others = [each for component, _, each in workloads(objects) if component != "scheduler"]
    assert all(each["spec"]["automountServiceAccountToken"] is False for each in others)


def test_images(helm: Helm) -> None:
    def images(values: Object) -> set[str]:
        return {spec["containers"][0]["image"] for spec in pod_specs(helm.objects(values))}

    assert images({}) == {"lockstep-gateway:0.1.0", "lockstep-scheduler:0.1.0", "lockstep-worker:0.1.0"}
    changed = {"image": {"registry": "example.com/a/", "tag": "dev"}, "worker": {"mode": "cpu"}, "scheduler": {"image": {"tag": "next"}}}
    assert images(changed) == {
        "example.com/a/lockstep-gateway:dev",
        "example.com/a/lockstep-scheduler:next",
        "example.com/a/lockstep-worker-cpu:dev",
    }
    digest = "sha256:" + "0" * 64
    assert f"lockstep-gateway@{digest}" in images({"gateway": {"image": {"digest": digest}}})


def test_only_the_hops_that_exist_are_allowed(helm: Helm) -> None:
    objects = helm.objects()
    peers = {}
    for component in ("gateway", "scheduler", "worker"):
        spec = of_kind(objects, "NetworkPolicy", component)["spec"]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        peers[component] = {
            peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for rule in spec["ingress"] + spec["egress"]
            for peer in rule.get("from", []) + rule.get("to", [])
            if "podSelector" in peer
        }
    assert peers == {"gateway": {"scheduler"}, "scheduler": {"gateway", "scheduler", "worker"}, "worker": {"scheduler"}}


def egress_ports(objects: list[Object], component: str) -> list[Object]:
    return [port for rule in of_kind(objects, "NetworkPolicy", component)["spec"]["egress"] for port in rule["ports"]]


def test_policies_open_what_the_values_name(helm: Helm) -> None:
    traced = {"gateway": {"settings": {"trace_endpoint": "http://collector.tracing:4318"}}}
    objects = helm.objects(merged(traced, {"monitoring": {"stack": {"enabled": True}}}))
    assert {"port": 4318, "protocol": "TCP"} in egress_ports(objects, "gateway")
    assert {"port": 4318, "protocol": "TCP"} not in egress_ports(objects, "scheduler")
    for component in ("gateway", "scheduler", "worker", "prometheus", "grafana"):
        names = [port["port"] for port in egress_ports(objects, component) if port.get("protocol") == "UDP"]
        assert names == [53, 5353], component  # the second is OpenShift's, which policies see behind its Service


def test_a_policy_without_ports_of_the_api_server_opens_no_others(helm: Helm) -> None:
    objects = helm.objects({"scheduler": {"apiServerPorts": []}, "monitoring": {"stack": {"enabled": True}}})
    for component in ("scheduler", "prometheus"):
        rules = of_kind(objects, "NetworkPolicy", component)["spec"]["egress"]
        assert all(rule["ports"] for rule in rules), component  # a rule without any is about all ports
        assert 6443 not in [port["port"] for port in egress_ports(objects, component)]


def test_trials_run_where_gateways_may(helm: Helm) -> None:
    place = {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"operator": "Exists"}]}
    trials = [each["spec"] for each in helm.objects({"gateway": place}) if each["kind"] == "Pod"]
    assert trials
    assert all(trial.items() >= place.items() for trial in trials)


def test_every_container_says_what_it_needs_as_a_quota_demands(helm: Helm) -> None:
    objects = helm.objects({"model": {"source": HUB}, "monitoring": {"stack": {"enabled": True}}})
    for spec in pod_specs(objects):
        for container in spec["containers"] + spec.get("initContainers", []):
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, container["name"]


def test_pods_fit_the_security_level_restricted_but_for_folders_of_nodes(helm: Helm) -> None:
    admitted = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
    everything = merged(*(positions[-1] for positions in SWITCHES.values()))
    claim, folder = SWITCHES["model"][1:3]
    for values, others in ((everything, set()), (merged(everything, claim), set()), (merged(everything, folder), {"hostPath"})):
        specs = list(pod_specs(helm.objects(values)))
        volumes = {kind for spec in specs for volume in spec.get("volumes", []) for kind in volume.keys() - {"name"}}
        assert volumes - admitted == others
        for spec in specs:
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
            assert not any("hostPort" in port for container in spec["containers"] for port in container.get("ports", []))


def test_the_cluster_may_choose_the_user(helm: Helm) -> None:
    chosen = {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}}
    objects = helm.objects({"gateway": chosen, "scheduler": chosen, "worker": chosen, "monitoring": {"stack": {"enabled": True}}})
    check(objects)
    assert not any(spec["securityContext"].keys() & chosen["podSecurityContext"].keys() for spec in pod_specs(objects))


def test_an_eviction_waits_for_no_pod_that_is_unready_anyway(helm: Helm) -> None:
    objects = helm.objects({"gateway": {"pdb": {"enabled": True}}, "worker": {"pdb": {"enabled": True}}})
    budgets = [each["spec"] for each in objects if each["kind"] == "PodDisruptionBudget"]
    assert [budget["unhealthyPodEvictionPolicy"] for budget in budgets] == ["AlwaysAllow"] * 3


def test_trials_reach_what_few_others_may(helm: Helm) -> None:
    stranger = {"namespaceSelector": {"matchLabels": {"team": "web"}}}
    objects = helm.objects({"networkPolicy": {"clientsFrom": [stranger], "monitoringFrom": [stranger]}})
    (trial, *_) = (each for each in objects if each["kind"] == "Pod")
    for component, port in (("gateway", "http"), ("scheduler", "admin")):
        spec = of_kind(objects, "NetworkPolicy", component)["spec"]
        peers = [peer for rule in spec["ingress"] if {"port": port} in rule["ports"] for peer in rule["from"]]
        assert stranger in peers
        labels = [peer["podSelector"]["matchLabels"] for peer in peers if "podSelector" in peer]
        assert any(each.items() <= trial["metadata"]["labels"].items() for each in labels)


def test_extra_objects_are_templates(helm: Helm) -> None:
    extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more", "labels": {}}, "data": {}}
    text = yaml.safe_dump({**extra, "metadata": {"name": "{{ .Release.Name }}-text"}})
    names = [each["metadata"]["name"] for each in helm.objects({"extraObjects": [extra, text]})]
    assert [name for name in names if name.endswith(("-more", "-text"))] == ["trial-more", "trial-text"]


def test_every_value_is_explained() -> None:
    assert "# None" not in (CHART / "values.yaml").read_text()


def test_the_chart_may_be_part_of_another_one(helm: Helm, tmp_path: Path) -> None:
    dependency = {"name": "lockstep", "version": "0.1.0", "condition": "lockstep.enabled"}
    chart = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart))
    shutil.copytree(CHART, tmp_path / "charts/lockstep")
    for enabled in (True, False):
        values = {"lockstep": {"enabled": enabled, "worker": {"mode": "cpu"}}, "global": {"region": "eu"}}
        assert ("kind: StatefulSet" in helm.run("template", "trial", str(tmp_path), values=values)) is enabled


def test_generated_files_are_up_to_date() -> None:
    stale = [str(path) for path, content in generated().items() if (ROOT / path).read_text() != content]
    assert not stale, f"run `make chart`: {stale}"


@pytest.mark.parametrize(
    "command",
    [
        (
            "trivy",
            "config",
            "--skip-check-update",
            "--skip-version-check",
            "--disable-telemetry",
            "--quiet",
            "--exit-code",
            "1",
            "--ignorefile",
            str(ROOT / "helm/trivyignore.yaml"),
            "--helm-set",
            "monitoring.stack.enabled=true",
            str(CHART),
        ),
        ("hadolint", str(ROOT / "Dockerfile")),
        (
            "yamllint",
            "--strict",
            "-d",
            "{extends: default, rules: {line-length: {max: 400}, indentation: {indent-sequences: whatever}, document-start: disable}}",
            str(CHART / "values.yaml"),
            str(CHART / "Chart.yaml"),
        ),
    ],
    ids=lambda command: command[0],
)
def test_linters_are_clean(command: tuple[str, ...]) -> None:
    done = subprocess.run([str(Path(sys.executable).with_name(command[0])), *command[1:]], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rendered_yaml_is_clean(helm: Helm, tmp_path: Path) -> None:
    (tmp_path / "rendered.yaml").write_text(helm.template(merged(*(positions[-1] for positions in SWITCHES.values()))))
    rules = "{extends: relaxed, rules: {line-length: disable, indentation: disable, empty-lines: disable, trailing-spaces: enable}}"
    done = subprocess.run(
        [str(Path(sys.executable).with_name("yamllint")), "--strict", "-d", rules, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_keys_spare_the_trials_that_need_one(helm: Helm) -> None:
    def trials(values: Object) -> set[str]:
        return {each["metadata"]["name"] for each in helm.objects(values) if each["kind"] == "Pod"}

    assert trials({}) == {"trial-lockstep-test-completion", "trial-lockstep-test-stream", "trial-lockstep-test-metrics"}
    assert trials({"auth": {"existingSecret": "keys"}}) == {"trial-lockstep-test-metrics"}
    assert len(trials({"auth": {"existingSecret": "keys"}, "tests": {"keySecret": "key"}})) == 3
    move = {"worker": {"replicas": 2}, "tests": {"moveEnabled": True}}
    role = of_kind(helm.objects(move), "Role", "test")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "delete"]}]


def test_notes_lead_to_an_answer_and_warn(helms: dict[str, Helm]) -> None:
    def notes(values: Object) -> str:
        helm = helms["helm 4"]  # Helm 3 renders notes only against a cluster
        return helm.run("install", "trial", str(CHART), "--dry-run=client", "--hide-secret", values=values).partition("NOTES:")[2]

    plain = notes({})
    assert "curl $URL/v1/chat/completions" in plain
    assert "port-forward service/trial-lockstep-gateway 8000:80" in plain
    assert "No API keys are set" in plain
    secret = {
        "auth": {"keys": [{"name": "a", "sha256": "0" * 64}]},
        "model": {"source": merged(HUB, {"huggingFace": {"token": "hf_literal"}})},
    }
    quiet = notes(merged(secret, {"gateway": {"replicas": 2}, "model": {"source": {"huggingFace": {"revision": "c0ffee"}}}}))
    assert "Mind:" not in quiet
    assert "hf_literal" not in quiet
    assert "does not know keda.sh/v1alpha1" in notes({"worker": {"autoscaling": {"enabled": True, "prometheusAddress": "http://p:9090"}}})
    assert "answers are made up" in notes({"worker": {"mode": "simulated"}})
    balanced = notes({"gateway": {"service": {"type": "LoadBalancer"}}})
    assert "{.status.loadBalancer.ingress[0]['ip','hostname']}" in balanced  # some balancers have the one, some the other


def test_str_09_an_ingress_of_nginx_neither_collects_streams_nor_cuts_them_off(helm: Helm) -> None:
    ingress = {"gateway": {"ingress": {"enabled": True, "preset": "nginx", "host": "llm.example.com"}}}
    annotations = of_kind(helm.objects(ingress), "Ingress")["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert int(annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"]) >= 600
    body = "nginx.ingress.kubernetes.io/proxy-body-size"
    assert int(annotations[body]) > GatewaySettings.model_fields["max_body_bytes"].default  # who is refused learns it from the gateway
    larger = merged(ingress, {"gateway": {"settings": {"max_body_bytes": 1 << 26}}})
    assert int(of_kind(helm.objects(larger), "Ingress")["metadata"]["annotations"][body]) > 1 << 26

"""The files under infra/ against the schemas of the tools that read them. None of those tools runs here."""

import asyncio
import json
import re
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from kubernetes_asyncio.client import models

REPOSITORY = Path(__file__).resolve().parents[3]
INFRA = REPOSITORY / "infra"
CONTAINERS = ("postgres", "prefect-server", "s3", "bucket", "ray-head", "ray-worker", "prefect-worker", "prometheus")


def read(name: str) -> Any:
    return yaml.safe_load((INFRA / name).read_text())


def check_kubernetes(value: Any, kind: str, where: str = "") -> None:
    """Every key is known to the Kubernetes API and every value of its kind; `kind` is written as the client does."""
    if match := re.fullmatch(r"list\[(.+)\]", kind):
        assert isinstance(value, list), where
        for index, item in enumerate(value):
            check_kubernetes(item, match[1], f"{where}[{index}]")
    elif match := re.fullmatch(r"dict\(str, (.+)\)|dict\[str, (.+)\]", kind):
        assert isinstance(value, dict), where
        for key, item in value.items():
            check_kubernetes(item, match[1] or match[2], f"{where}.{key}")
    elif kind in ("str", "int", "bool"):
        assert isinstance(value, {"str": str, "int": int, "bool": bool}[kind]), f"{where}: {value!r} is no {kind}"
    elif kind != "object":
        model = getattr(models, kind)
        fields = {name: model.openapi_types[attribute] for attribute, name in model.attribute_map.items()}
        assert isinstance(value, dict), where
        for key, item in value.items():
            assert key in fields, f"{where} has no {key}"
            check_kubernetes(item, fields[key], f"{where}.{key}")


# compose


def test_compose_follows_the_compose_specification() -> None:
    jsonschema.validate(read("compose.yaml"), get_builtin_schema("vendor.compose-spec"))
    assert tuple(read("compose.yaml")["services"]) == CONTAINERS


def test_compose_opens_ports_on_loopback_only() -> None:
    for name, service in read("compose.yaml")["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


def test_compose_holds_no_secret_and_names_only_those_that_are_made(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    subprocess.run([str(INFRA / "make-secrets.sh"), str(folder)], check=True, capture_output=True)
    compose = read("compose.yaml")
    named = {secret["file"] for secret in compose["secrets"].values()}
    named |= {file for service in compose["services"].values() for file in service.get("env_file", [])}
    assert named == {f"secrets/{path.name}" for path in folder.iterdir()}
    for service in compose["services"].values():
        assert set(service.get("secrets", [])) <= set(compose["secrets"])
        for variable in service.get("environment", {}):
            assert not re.search("PASSWORD$|KEY$|TOKEN$|AUTH_STRING$|CONNECTION_URL$", variable), variable


def test_secrets_are_random_fit_together_and_are_made_once(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        folder = tmp_path / name
        for _ in range(2):
            subprocess.run([str(INFRA / "make-secrets.sh"), str(folder)], check=True, capture_output=True)
            contents.append({path.name: path.read_text() for path in folder.iterdir()})
    assert contents[0] == contents[1]
    assert contents[2] == contents[3]
    assert all(contents[0][name] != contents[2][name] for name in contents[0])
    made = contents[0]
    assert f"prefect:{made['postgres_password']}@postgres:5432/prefect" in made["prefect-server.env"]
    login = made["prefect-client.env"].removeprefix("PREFECT_API_AUTH_STRING=").strip()
    assert f"PREFECT_SERVER_API_AUTH_STRING={login}" in made["prefect-server.env"]
    (user,) = json.loads(made["s3_users.json"])["identities"]
    assert f"AWS_ACCESS_KEY_ID={user['credentials'][0]['accessKey']}" in made["store.env"]
    assert f"AWS_SECRET_ACCESS_KEY={user['credentials'][0]['secretKey']}" in made["store.env"]
    assert stat.S_IMODE((tmp_path / "one" / "store.env").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o700


def test_secrets_stay_out_of_git_and_out_of_the_image() -> None:
    assert "/infra/secrets/" in (REPOSITORY / ".gitignore").read_text().splitlines()
    lines = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    assert not any("infra" in line for line in lines)


# image


def test_the_image_copies_only_files_that_exist_and_that_reach_the_build() -> None:
    dockerfile = (INFRA / "Dockerfile").read_text()
    kept = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY --chown=skyrl (.+)$", dockerfile, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (REPOSITORY / source).exists(), source
            assert source == "." or any(Path(source).match(pattern) for pattern in kept), source
    assert {path for pattern in kept for path in REPOSITORY.glob(pattern)} >= {
        REPOSITORY / name for name in ("flows", "tasks", "skyrl_core", "constraints-cpu.txt", "overrides-gpu.txt")
    }


def test_the_image_installs_extras_that_the_project_has_as_a_user_without_rights() -> None:
    dockerfile = (INFRA / "Dockerfile").read_text()
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"--extra (\S+)", dockerfile)) == set(extras)
    assert re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE) == ["base", "cpu", "gpu"]
    assert re.findall(r"^USER (\S+)$", dockerfile, re.MULTILINE) == ["skyrl"]


# Kubernetes


def test_the_ray_cluster_has_kuberays_fields_and_pods_that_kubernetes_knows() -> None:
    import ray

    manifest = read("kubernetes/raycluster.yaml")
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    spec = manifest["spec"]
    assert set(spec) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert spec["rayVersion"] == ray.__version__
    assert set(spec["headGroupSpec"]) == {"serviceType", "rayStartParams", "template"}
    worker_fields = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    for group in spec["workerGroupSpecs"]:
        assert set(group) == worker_fields
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        check_kubernetes(group["template"], "V1PodTemplateSpec", "template")


def test_the_check_of_pods_finds_a_misspelt_key() -> None:
    template = read("kubernetes/raycluster.yaml")["spec"]["headGroupSpec"]["template"]
    template["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(AssertionError, match=r"containers\[0\] has no volumeMount"):
        check_kubernetes(template, "V1PodTemplateSpec", "template")


def test_prefect_takes_the_work_pool_and_makes_a_job_that_kubernetes_knows() -> None:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.server.schemas.actions import WorkPoolCreate
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    template = json.loads((INFRA / "kubernetes" / "work-pool.json").read_text())
    WorkPoolCreate(name="skyrl", type="kubernetes", base_job_template=template)
    jsonschema.Draft202012Validator.check_schema(template["variables"])
    for name, variable in template["variables"]["properties"].items():
        assert "default" not in variable or not list(
            jsonschema.Draft202012Validator(variable).iter_errors(variable["default"])
        ), name

    values = {"env": {"PREFECT_API_URL": "http://server/api"}, "store_secret": "team-store"}
    # Nothing in the template refers to the server, so the client is never used.
    job = asyncio.run(
        KubernetesWorkerJobConfiguration.from_template_and_values(
            template, values, client=PrefectClient("http://127.0.0.1:9/api")
        )
    )
    job.prepare_for_flow_run(FlowRun(flow_id="11111111-1111-1111-1111-111111111111", name="night"))
    pod = job.job_manifest["spec"]["template"]["spec"]
    # Prefect insists on these two here, where Kubernetes ignores them.
    assert (pod.pop("completions"), pod.pop("parallelism")) == (1, 1)
    check_kubernetes(job.job_manifest, "V1Job", "job")
    (container,) = pod["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "team-store"}}]
    variables = {item["name"]: item for item in container["env"]}
    assert variables["PREFECT_API_URL"]["value"] == "http://server/api"
    assert variables["RAY_ADDRESS"]["value"] == "skyrl-head-svc:6379"
    assert variables["RAY_AUTH_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "skyrl-ray", "key": "token"}}
    assert container["args"] == ["prefect", "flow-run", "execute"]
    assert "{{" not in json.dumps(job.job_manifest)


# Ray and Prometheus


def test_ray_takes_the_launchers_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = read("ray-cluster.yaml")
    validate_config(prepare_config(config))
    assert config["max_workers"] == len(config["provider"]["worker_ips"])
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config({**config, "max_worker": 3}))


def test_prometheus_scrapes_every_ray_node_of_compose_and_vllm() -> None:
    jobs = {job["job_name"]: job for job in read("prometheus.yaml")["scrape_configs"]}
    assert set(jobs) == {"ray", "vllm"}
    services = read("compose.yaml")["services"]
    exporting = {
        f"{name}:8080"
        for name, service in services.items()
        if "--metrics-export-port=8080" in service.get("command", [])
    }
    assert set(jobs["ray"]["static_configs"][0]["targets"]) == exporting
    assert jobs["vllm"]["metrics_path"] == "/metrics"

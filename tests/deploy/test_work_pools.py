"""Base job templates of the work pools, rendered by prefect-kubernetes itself."""

import asyncio
import copy
import re
import uuid

import jsonschema
import kubernetes_validate
import pytest
import yaml
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.server.schemas.actions import WorkPoolCreate
from prefect.utilities.schema_tools import is_valid_schema, validate
from prefect.utilities.templating import find_placeholders
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from tests.deploy import kit

every_pool = pytest.mark.parametrize("pool", sorted(kit.POOLS))
VARIANTS = [("coresample-cpu", {})] + [
    ("coresample-gpu", values)
    for values in (
        {},
        *({"gpus": count} for count in (0, 1, 4, 8)),
        {
            "gpus": 8,
            "shm_size": "32Gi",
            "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
            "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "extract", "effect": "NoSchedule"}],
            "memory_limit": "512Gi",
            "cpu_limit": "64",
            "scratch_storage_class": "local-nvme",
            "runtime_class_name": "nvidia",
            "priority_class_name": "batch",
            "image_pull_secrets": [{"name": "registry"}],
            "active_deadline_seconds": 86400,
            "termination_grace_period_seconds": 300,
            "env": {"NCCL_DEBUG": "WARN"},
        },
    )
]


def test_the_pools_are_the_two_that_deployments_name():
    assert kit.POOLS.keys() == {"coresample-cpu", "coresample-gpu"}


@every_pool
def test_the_server_accepts_it(pool):
    WorkPoolCreate(name=pool, type="kubernetes", base_job_template=kit.POOLS[pool])
    is_valid_schema(kit.POOLS[pool]["variables"])  # raises where it is not
    jsonschema.Draft202012Validator.check_schema(kit.POOLS[pool]["variables"])


def test_deployments_set_only_variables_that_their_pool_has():
    deployments = yaml.safe_load((kit.ROOT / "prefect.yaml").read_text())["deployments"]
    assert {deployment["work_pool"]["name"] for deployment in deployments} == kit.POOLS.keys()
    for deployment in deployments:
        schema = kit.POOLS[deployment["work_pool"]["name"]]["variables"]
        given = deployment["work_pool"].get("job_variables", {})
        assert given.keys() <= schema["properties"].keys(), deployment["name"]
        validate(given, schema, raise_on_error=True, ignore_required=True)
        if found := re.fullmatch(r"gpu-(\d+)", deployment["name"]):
            assert given["gpus"] == int(found[1])


@every_pool
def test_placeholders_and_variables_are_the_same(pool):
    template = kit.POOLS[pool]
    placeholders = {found.name for found in find_placeholders(template["job_configuration"])}
    assert placeholders == template["variables"]["properties"].keys()


@every_pool
def test_defaults_fit_their_own_schema_and_each_variable_says_what_it_is(pool):
    properties = kit.POOLS[pool]["variables"]["properties"]
    for name, schema in properties.items():
        assert schema["title"] and schema["description"], name
        if "default" in schema:
            jsonschema.validate(schema["default"], schema)


@pytest.mark.parametrize(
    "wrong", [{"gpus": -1}, {"termination_grace_period_seconds": 30}, {"backoff_limit": 3}, {"tolerations": "x"}]
)
def test_values_that_would_lose_work_are_refused(wrong):
    with pytest.raises(Exception, match="validation|is less than|is greater than|not of type"):
        validate(wrong, kit.POOLS["coresample-gpu"]["variables"], raise_on_error=True, ignore_required=True)


async def _configuration(pool, values):
    validate(values, kit.POOLS[pool]["variables"], raise_on_error=True, ignore_required=True)
    # Never entered: nothing in the templates asks the server for anything.
    client = PrefectClient("http://127.0.0.1:9/api")
    made = await KubernetesWorkerJobConfiguration.from_template_and_values(
        copy.deepcopy(kit.POOLS[pool]), copy.deepcopy(values), client=client
    )
    made.prepare_for_flow_run(FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), name="amber-heron"))
    return made


@pytest.fixture(params=VARIANTS, ids=lambda case: f"{case[0]}-{case[1].get('gpus', 'default')}-{len(case[1])}")
def rendered(request):
    """Pool, values and the job that the worker would create."""
    pool, values = request.param
    return pool, values, asyncio.run(_configuration(pool, values)).job_manifest


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_the_job_is_valid(rendered, version):
    manifest = copy.deepcopy(rendered[2])
    pod = manifest["spec"]["template"]["spec"]
    # prefect-kubernetes demands these two where Kubernetes has no such fields and drops them.
    assert (pod.pop("completions"), pod.pop("parallelism")) == (1, 1)
    kubernetes_validate.validate(manifest, version, strict=True)
    assert "{{" not in str(manifest)


def test_the_pod_holds_one_tensor_parallel_group(rendered):
    pool, values, manifest = rendered
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    gpus = values.get("gpus", 1) if pool == "coresample-gpu" else None
    assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
    assert container["resources"]["requests"].get("nvidia.com/gpu") == gpus
    assert manifest["spec"]["completions"] == manifest["spec"]["parallelism"] == 1


def test_shared_memory_scratch_and_models_are_mounted(rendered):
    pool, values, manifest = rendered
    pod = manifest["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in copy.deepcopy(pod["volumes"])}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    default = "16Gi" if pool == "coresample-gpu" else "2Gi"
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["sizeLimit"] == values.get("shm_size", default)
    assert volumes[mounts["/models"]]["persistentVolumeClaim"] == {"claimName": "coresample-models"}
    assert "ephemeral" in volumes[mounts["/scratch"]]
    assert ("coresample-models", "PersistentVolumeClaim") in {
        (item["metadata"]["name"], item["kind"]) for _, item in kit.manifests()
    }


def test_the_pod_ends_in_its_own_time_and_is_rescheduled_by_prefect(rendered):
    _, values, manifest = rendered
    pod = manifest["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == values.get("termination_grace_period_seconds", 120) >= 60
    environment = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
    assert manifest["spec"]["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    assert environment["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] == "reschedule"
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30" and environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment.get("NCCL_DEBUG") == values.get("env", {}).get("NCCL_DEBUG")


def test_the_pod_has_no_privileges_and_keeps_what_was_asked(rendered):
    _, values, manifest = rendered
    pod = manifest["spec"]["template"]["spec"]
    (user,) = kit.said(kit.DOCKER / "gpu.Dockerfile", "USER")
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and f"{context['runAsUser']}:{context['runAsGroup']}" == user
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["serviceAccountName"] == "coresample-job" and pod["automountServiceAccountToken"] is False
    assert pod.get("nodeSelector") == values.get("node_selector")
    assert pod.get("priorityClassName") == values.get("priority_class_name")
    # The image's ENTRYPOINT stays PID 1: the command is given as args.
    assert "command" not in pod["containers"][0] and pod["containers"][0]["args"][0] == "prefect"
    if "tolerations" in values:
        assert pod["tolerations"] == values["tolerations"]


def test_the_two_pools_differ_only_where_gpus_matter():
    cpu, gpu = (kit.POOLS[f"coresample-{kind}"] for kind in ("cpu", "gpu"))
    only = gpu["variables"]["properties"].keys() ^ cpu["variables"]["properties"].keys()
    assert only == {"gpus", "runtime_class_name"}
    stripped = copy.deepcopy(gpu["job_configuration"])
    pod = stripped["job_manifest"]["spec"]["template"]["spec"]
    del pod["runtimeClassName"]
    for kind in ("limits", "requests"):
        del pod["containers"][0]["resources"][kind]["nvidia.com/gpu"]
    assert stripped == cpu["job_configuration"]

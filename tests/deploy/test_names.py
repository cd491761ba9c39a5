"""Every setting that the files name exists in the installed Prefect, so that a renamed one fails here."""

import os
import re
import subprocess
import sys

import pytest
from prefect.settings import Settings
from prefect.settings.base import PrefectBaseSettings
from prefect.settings.legacy import _get_valid_setting_names
from prefect_kubernetes.settings import KubernetesSettings
from prefect_redis.client import RedisMessagingSettings

from tests.deploy import kit


def variables_of(model: type[PrefectBaseSettings]) -> set[str]:
    """Environment variables of a settings class and of those inside it."""
    names = set()
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, PrefectBaseSettings):
            names |= variables_of(field.annotation)
        else:
            names.add(f"{model.model_config['env_prefix']}{name}".upper())
    return names


KNOWN = _get_valid_setting_names(Settings) | variables_of(KubernetesSettings) | variables_of(RedisMessagingSettings)
KNOWN.add("PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR")  # read by prefect flow-run execute itself


def used() -> dict[str, set[str]]:
    """Names of PREFECT_ variables by the file that sets them."""
    found = {path.name: set(kit.environment(path)) for path in kit.DOCKERFILES}
    services = kit.compose()["services"]
    found["compose.yaml"] = {name for service in services.values() for name in service.get("environment", {})}
    for name, item in kit.manifests():
        names = found.setdefault(name, set())
        names |= set(item.get("data", {})) if item["kind"] == "ConfigMap" else set()
        for container in (kit.pod_spec(item) or {"containers": []})["containers"]:
            names |= {variable["name"] for variable in container.get("env", [])}
    for name, template in kit.POOLS.items():
        found[name] = set(template["variables"]["properties"]["env"]["default"])
    kustomization = (kit.OVERLAY / "kustomization.yaml").read_text()
    found["overlay"] = set(re.findall(r"\bPREFECT_[A-Z_]+\b", kustomization))
    own = set(re.findall(r"^(PREFECT_\w+)=", (kit.DOCKER / ".env.example").read_text(), re.MULTILINE))
    found["deployment.md"] = (
        set(re.findall(r"\bPREFECT_[A-Z_]+\b", (kit.ROOT / "docs" / "deployment.md").read_text())) - own
    )
    return {file: {name for name in names if name.startswith("PREFECT_")} for file, names in found.items()}


@pytest.mark.parametrize("file", sorted(used()))
def test_prefect_knows_the_name(file):
    assert used()[file] - KNOWN == set()


def test_an_unknown_name_would_be_noticed():
    assert "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE" in KNOWN
    assert "PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET_NAME" in KNOWN
    assert "PREFECT_REDIS_MESSAGING_URL" in KNOWN
    assert "PREFECT_SERVER_LEASE_STORAGE" not in KNOWN


MUST = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE",
    "PREFECT_SERVER_API_AUTH_STRING",
    "PREFECT_API_AUTH_STRING",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY",
    "PREFECT_CLIENT_MAX_RETRIES",
    "PREFECT_SERVER_ANALYTICS_ENABLED",
    "PREFECT_SERVER_EVENTS_MESSAGING_BROKER",
    "PREFECT_SERVER_EVENTS_MESSAGING_CACHE",
    "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING",
    "PREFECT_SERVER_DOCKET_URL",
    "PREFECT_REDIS_MESSAGING_URL",
}


def test_compose_and_kubernetes_set_what_matters():
    assert used()["compose.yaml"] >= MUST
    in_cluster = set().union(
        *(names for file, names in used().items() if file not in ("compose.yaml", "deployment.md"))
    )
    assert in_cluster >= MUST


def test_prefect_takes_the_values_too():
    """A process with compose's server environment reads it back, and every module that a value names is there."""
    filled = dict.fromkeys(("POSTGRES_PASSWORD", "REDIS_PASSWORD", "PREFECT_AUTH_STRING"), "pass")
    filled |= {"S3_ACCESS_KEY_ID": "a", "S3_SECRET_ACCESS_KEY": "b"}
    environment = kit.interpolate(kit.compose()["services"]["server"]["environment"], filled)
    code = """
import importlib
from prefect.settings import get_current_settings
server = get_current_settings().server
assert server.docket.url == "redis://default:pass@redis:6379/1", server.docket.url
assert server.api.auth_string.get_secret_value() == "pass"
assert server.database.connection_url.get_secret_value() == "postgresql+asyncpg://prefect:pass@postgres:5432/prefect"
assert server.analytics_enabled is False
for module, name in (
    (server.concurrency.lease_storage, "ConcurrencyLeaseStorage"),
    (server.events.messaging_broker, "Publisher"),
    (server.events.messaging_cache, "Cache"),
    (server.events.causal_ordering, "CausalOrdering"),
):
    assert module.startswith("prefect_redis."), module
    assert hasattr(importlib.import_module(module), name), (module, name)
from prefect_redis.client import RedisMessagingSettings
assert RedisMessagingSettings().url == "redis://default:pass@redis:6379/0"
print("ok")
"""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.strip() == "ok", done.stderr[-2000:]

"""What the tests of docker/ and kubernetes/ share: readers for Dockerfiles, compose variables and manifests."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
BASE = ROOT / "kubernetes" / "base"
OVERLAY = ROOT / "kubernetes" / "overlays" / "example"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
COMPOSE = DOCKER / "compose.yaml"
POOLS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (BASE / "work-pools").glob("*.json")}

_VARIABLE = re.compile(r"\$\$|\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile in order: name and arguments, continuation lines joined, comments left out."""
    lines = [line for line in dockerfile.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def said(dockerfile: Path, name: str) -> list[str]:
    """Arguments of every instruction of one name."""
    return [rest for found, rest in instructions(dockerfile) if found == name]


def environment(dockerfile: Path) -> dict[str, str]:
    """All ENV of a Dockerfile."""
    return dict(pair.split("=", 1) for rest in said(dockerfile, "ENV") for pair in rest.split())


def compose() -> dict[str, Any]:
    """The compose file as written, anchors and merges resolved, variables not."""
    return yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))


def variables(value: str) -> Iterator[re.Match[str]]:
    """Every ``${NAME}`` of a text, ``$$`` left out."""
    return (found for found in _VARIABLE.finditer(value) if found["name"])


def interpolate(value: Any, given: Mapping[str, str]) -> Any:
    """What compose makes of ``${NAME}``, ``${NAME:-default}``, ``${NAME:?message}`` and ``$$`` in a tree."""
    if isinstance(value, dict):
        return {key: interpolate(item, given) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolate(item, given) for item in value]
    if not isinstance(value, str):
        return value

    def one(found: re.Match[str]) -> str:
        if not found["name"]:
            return "$"
        came = given.get(found["name"], "")
        if not came and found["kind"] == "?":
            raise ValueError(f"{found['name']}: {found['rest']}")
        return came or (found["rest"] if found["kind"] == "-" else "") or ""

    return _VARIABLE.sub(one, value)


def manifests() -> list[tuple[str, dict[str, Any]]]:
    """Every Kubernetes object under kubernetes/, with its file; kustomizations left out."""
    found = []
    for path in sorted([*BASE.glob("*.yaml"), *OVERLAY.glob("*.yaml")]):
        if path.name != "kustomization.yaml":
            found += [(path.name, item) for item in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    return found


def pod_spec(manifest: dict[str, Any]) -> dict[str, Any] | None:
    """The pod that an object makes, None where it makes none."""
    return manifest.get("spec", {}).get("template", {}).get("spec")


def in_git(path: str) -> list[str]:
    """Files at or below a path that git has or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", path]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in listed if name and (ROOT / name).exists()]


def sent_to_builder(name: str) -> bool:
    """Whether .dockerignore lets a file through; the last pattern that matches it or a folder above it decides."""
    path, sent = PurePosixPath(name), True
    names = [str(path), *map(str, path.parents)]
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        wanted, pattern = pattern.startswith("!"), pattern.removeprefix("!")
        bare = pattern.removeprefix("**/")
        if any(fnmatch.fnmatch(part, pattern) or fnmatch.fnmatch(PurePosixPath(part).name, bare) for part in names):
            sent = wanted
    return sent

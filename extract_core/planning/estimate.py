"""How long an extraction will take: from an earlier run in the same root, else from a short measurement here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from extract_core.errors import StoreError
from extract_core.store import layout
from extract_core.store.commits import all_records, read_commits
from extract_core.store.root import Root
from extract_core.store.versions import list_versions, read_manifest

EFFICIENCY = 0.5
"""Share of the measured matrix-product rate that a prefill reaches."""
_MEASURE_S = 0.4
_PLANS_READ = 20


@dataclass(frozen=True)
class Rate:
    """Computed tokens per second of the capture, and where the number comes from."""

    tokens_per_s: float
    kind: Literal["earlier_run", "earlier_version", "measured"]
    source: str


@dataclass(frozen=True)
class Estimate:
    """Time of the capture without starting the engine (seconds to minutes, by the model's size)."""

    tokens: int
    seconds: float
    tokens_per_s: float
    kind: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def estimate(
    root: Root, spec: Mapping[str, Any], *, tokens: int, parameters: int, hidden_size: int, gpus: int = 1
) -> Estimate:
    """Time for so many tokens.

    Args:
        root: looked through for commit records and manifests of the same model, layers and compute dtype.
        spec: the plan's fingerprint document.
        tokens: still to be computed; what samples share counts once.
        parameters: of the model; a mixture of experts uses only a part of them per token and is faster than this says.
        hidden_size: H, the size of the products measured.
        gpus: GPUs that share one copy of the model.
    """
    rate = earlier_rate(root, spec) or measured_rate(
        parameters, hidden_size=hidden_size, dtype=str(spec["compute_dtype"]), gpus=gpus
    )
    return Estimate(tokens, tokens / rate.tokens_per_s, rate.tokens_per_s, rate.kind, rate.source)


def earlier_rate(root: Root, spec: Mapping[str, Any]) -> Rate | None:
    """The rate at which this root's own shards were extracted; None where nothing comparable was."""
    from extract_core.planning.plan import read_plan_meta

    for fingerprint in root.list(layout.PLANS)[:_PLANS_READ]:
        try:
            meta = read_plan_meta(root, fingerprint)
            if meta is None or not _comparable(meta.spec, spec):
                continue
            commits = read_commits(root, fingerprint)
        except (StoreError, FileNotFoundError, ValueError):
            continue  # an estimate is not worth a failure; verify and status report damage
        records = list(all_records(commits))
        timings = [record.timings for record in records if record.timings.get("engine_s")]
        tokens = sum(timing.get("computed", timing.get("tokens", 0.0)) for timing in timings)
        # A shard is checked and stored while the next one is captured, so the slower of the two counts.
        seconds = sum(
            max(timing["engine_s"], timing.get("check_and_seal_s", 0.0) + timing.get("store_s", 0.0))
            for timing in timings
        )
        if tokens and seconds:
            devices = sorted({str(record.engine.get("device", "unknown device")) for record in records})
            return Rate(
                tokens / seconds,
                "earlier_run",
                f"{tokens:,.0f} tokens in {len(timings)} shards of this root took {seconds:,.1f} s on "
                f"{', '.join(devices)}",
            )
    for version in reversed(list_versions(root)[-_PLANS_READ:]):
        try:
            manifest = read_manifest(root, version)
        except StoreError:
            continue
        tokens_per_s = manifest.timings.get("computed_per_s", manifest.timings.get("tokens_per_s", 0.0))
        if tokens_per_s > 0 and _comparable(manifest.spec, spec):
            return Rate(tokens_per_s, "earlier_version", f"version {version} of this root was extracted at this rate")
    return None


def _comparable(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    return all(theirs.get(name) == ours.get(name) for name in ("model", "layer_ids", "compute_dtype"))


def measured_rate(parameters: int, *, hidden_size: int, dtype: str, gpus: int = 1) -> Rate:
    """Tokens per second from a matrix product measured here: ``0.5 * flops / (2 * parameters)``.

    A forward pass does two operations per parameter and token (Kaplan et al. 2020, section 2.1); attention over the
    context is left out, so long samples take longer.
    """
    flops, device = matmul_flops(hidden_size, dtype)
    rate = EFFICIENCY * flops * gpus / (2 * max(parameters, 1))
    times = f" times {gpus}" if gpus > 1 else ""
    return Rate(
        rate,
        "measured",
        f"a {dtype} matrix product on {device} ran at {flops / 1e9:,.0f} GFLOP/s here{times}; half of it over "
        f"{parameters / 1e6:,.0f} million parameters",
    )


def matmul_flops(hidden_size: int, dtype: str) -> tuple[float, str]:
    """Operations per second of ``[512, H] @ [H, 4H]`` (larger on a GPU), and the name of the device."""
    import torch

    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    rows, inner = (8192, max(hidden_size, 1024)) if gpu else (512, min(max(hidden_size, 256), 4096))
    left = torch.ones(rows, inner, dtype=getattr(torch, dtype), device=device)
    right = torch.ones(inner, 4 * inner, dtype=left.dtype, device=device)
    operations = 2 * rows * inner * 4 * inner
    best = 0.0
    with torch.inference_mode():
        deadline = time.perf_counter() + _MEASURE_S
        runs = 0
        while runs < 3 or time.perf_counter() < deadline:
            started = time.perf_counter()
            torch.mm(left, right)
            if gpu:
                torch.cuda.synchronize()
            best = max(best, operations / (time.perf_counter() - started))
            runs += 1
    return best, torch.cuda.get_device_name(0) if gpu else f"{torch.get_num_threads()} CPU threads"

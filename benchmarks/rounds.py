"""Contestants in turn: each loaded once in a process of its own, then round after round over the same samples.

The result file is written after every single run, so that a benchmark that is cut off keeps what it measured. A
contestant that fails is recorded with its reason and left out; the others go on.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contestants import ANSWER, Spec, write_spec
from benchmarks.watching import Watch
from benchmarks.workloads import Ids, Workload, write_samples


class ContestantError(Exception):
    """A contestant ended, failed or took too long; says what it said."""


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    Attributes:
        name: e.g. ``ours-alone``.
        engine: name of the process that runs it; several entries may share one.
        share: for ours, whether the job shares prefixes.
        part: share of the samples that it runs (slow ones need not run them all).
    """

    name: str
    engine: str
    share: bool = True
    part: float = 1.0


ENTRIES = {
    "prefill": Entry("prefill", "prefill"),
    "prefill-cached": Entry("prefill-cached", "prefill-cached"),
    "ours-alone": Entry("ours-alone", "ours", share=False),
    "ours": Entry("ours", "ours"),
    "connector": Entry("connector", "connector"),
    "connector-cached": Entry("connector-cached", "connector-cached"),
}
"""Prefill and connector with vLLM's prefix caching off and on; ours with prefix sharing off (alone) and on."""


def entries(text: str) -> list[Entry]:
    """``prefill,ours-alone:0.25,ours`` as entries; a number is the share of the samples."""
    found = []
    for word in text.split(","):
        name, _, part = word.partition(":")
        if name not in ENTRIES:
            raise ValueError(f"unknown contestant {name!r}; there are {', '.join(ENTRIES)}")
        known = ENTRIES[name]
        found.append(Entry(name, known.engine, known.share, float(part or 1)))
    return found


class Process:
    """A contestant's process."""

    def __init__(self, name: str, spec: Spec, folder: Path, environment: dict[str, str]) -> None:
        self.name, self.spec = name, spec
        self.log = folder / f"{name}.log"
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.facts: dict[str, Any] = {}
        file = write_spec(spec, folder / f"{name}.spec.json")
        self._log = self.log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contestants", str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.pid = self._process.pid
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(json.loads(line[len(ANSWER) :]))
            else:
                self._log.write(line)
                self._log.flush()
        self._answers.put(None)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            ContestantError: it failed, ended, or did not answer in time.
        """
        try:
            answer = self._answers.get(timeout=max(0.1, timeout_s))
        except queue.Empty:
            raise ContestantError(f"{self.name} gave no answer for {timeout_s:.0f} s") from None
        if answer is None or "failed" in answer:
            tail = " | ".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
            raise ContestantError(f"{self.name}: {(answer or {}).get('failed', 'the process ended')}; log: {tail}")
        return answer

    def ask(self, command: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a command and wait for its answer; raises ``ContestantError``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ContestantError(f"{self.name}: the process is gone ({error})") from error
        return self.answer(timeout_s)

    def close(self) -> None:
        """End it: politely, then with all its children."""
        import signal

        assert self._process.stdin is not None
        children = Watch.family(self.pid)
        try:
            self._process.stdin.close()
            self._process.wait(timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            pass
        for pid in [self.pid, *children]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()
        self._log.close()


@dataclass
class Session:
    """Contestants over workloads; use ``run``.

    Attributes:
        specs: by engine name.
        folder: for logs and samples.
        out: the result file.
        head: what goes into the result beside the figures.
        environment: of every contestant.
        ends_at: ``time.monotonic()`` after which nothing new begins.
        warm_tokens: what every contestant computes of each workload before anything is measured.
        at_once: start all engines at once (memory that engines do not measure for themselves).
    """

    specs: dict[str, Spec]
    folder: Path
    out: Path
    head: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    ends_at: float = float("inf")
    warm_tokens: int = 4 * 16384
    at_once: bool = True

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.processes: dict[str, Process] = {}
        self.result: dict[str, Any] = {**self.head, "engines": {}, "failed": {}, "workloads": [], "rounds": []}

    def run(self, plan: Sequence[tuple[Workload, Sequence[Entry]]], rounds: int) -> dict[str, Any]:
        """Everything; the result as it is in the file.

        Args:
            plan: workloads, each with who runs it.
            rounds: of each workload, one workload after the other.
        """
        with ExitStack() as stack:
            self._watch = stack.enter_context(Watch())
            self._start(stack, {entry.engine for _, entries in plan for entry in entries})
            for workload, entries in plan:
                self._workload(workload, entries, rounds)
        self.result["complete"] = len(self.result["rounds"]) == rounds * sum(len(entries) for _, entries in plan)
        self._write()
        return self.result

    def _start(self, stack: ExitStack, engines: set[str]) -> None:
        for name, spec in self.specs.items():
            if name not in engines:
                continue
            process = Process(name, spec, self.folder, self.environment)
            stack.callback(process.close)
            self.processes[name] = process
            if not self.at_once:
                self._await_start(process)
        for process in list(self.processes.values()) if self.at_once else []:
            self._await_start(process)
        for name, process in self.processes.items():
            self.result["engines"][name]["memory"] = self._watch.now(process.pid)
        self._write()

    def _await_start(self, process: Process) -> None:
        try:
            self.result["engines"][process.name] = process.answer(self._left())
            _say(f"{process.name}: ready after {self.result['engines'][process.name]['start_s']:.1f} s")
        except ContestantError as error:
            self._fail(process.name, error)

    def _left(self) -> float:
        return min(self.ends_at - time.monotonic(), 3600.0)

    def _fail(self, engine: str, error: ContestantError) -> None:
        _say(f"FAILED {error}")
        self.result["failed"][engine] = str(error)
        self.processes.pop(engine).close()
        self._write()

    def _workload(self, workload: Workload, entries: Sequence[Entry], rounds: int) -> None:
        if time.monotonic() > self.ends_at:
            _say(f"{workload.name}: no time left")
            return
        facts = workload.facts()
        self.result["workloads"].append(facts)
        parts = {entry.name: workload.part(entry.part) for entry in entries}
        for entry in entries:
            self._prepare(entry, workload.name, parts[entry.name].samples, facts)
        took: dict[str, float] = {}
        for number in range(rounds):
            turn = number % len(entries)  # nobody is always first
            for entry in [*entries[turn:], *entries[:turn]]:
                if entry.engine not in self.processes:
                    continue
                if time.monotonic() + 1.1 * took.get(entry.name, 0) > self.ends_at:
                    _say(f"{workload.name}: no time left for {entry.name} in round {number + 1}")
                    continue
                self._round(number, entry, workload.name, parts[entry.name], took)

    def _prepare(self, entry: Entry, name: str, samples: list[Ids], facts: dict[str, Any]) -> None:
        process = self.processes.get(entry.engine)
        if process is None:
            return
        warm: list[Ids] = []
        for ids in reversed(samples):  # the measured run begins with others
            warm.append(ids)
            if sum(map(len, warm)) >= self.warm_tokens:
                break
        try:
            for what, ids in ((f"{name}-warm", warm), (name, samples)):
                what += "" if entry.part == 1 else f"-{entry.part:g}"
                file = write_samples(ids, self.folder / f"{what}.npz")
                command = {"name": what, "share": entry.share}
                answer = process.ask({"do": "prepare", "file": str(file), **command}, self._left())
                if ids is warm:
                    process.ask({"do": "round", **command}, self._left())
                else:
                    facts.setdefault("prepared", {})[entry.name] = answer
        except ContestantError as error:
            self._fail(entry.engine, error)
        self._write()

    def _round(self, number: int, entry: Entry, name: str, workload: Workload, took: dict[str, float]) -> None:
        process = self.processes[entry.engine]
        what = name + ("" if entry.part == 1 else f"-{entry.part:g}")
        self._watch.reset()
        began = time.monotonic()
        try:
            found = process.ask({"do": "round", "name": what, "share": entry.share}, self._left())
        except ContestantError as error:
            self._fail(entry.engine, error)
            return
        took[entry.name] = time.monotonic() - began
        rate = workload.tokens / found["seconds"]
        figures = {"tokens": workload.tokens, "samples": len(workload.samples), "tokens_per_s": rate, **found}
        memory = self._watch.peak(process.pid)
        here = {"workload": name, "round": number, "contestant": entry.name}
        self.result["rounds"].append({**here, **figures, "memory": memory})
        self.result["summary"] = summary(self.result["rounds"])
        self._write()
        _say(f"{name} {number + 1} {entry.name}: {rate:,.0f} tokens/s, {found['seconds']:.2f} s")

    def _write(self) -> None:
        beside = self.out.with_name(f"{self.out.name}.new")
        beside.write_text(json.dumps(self.result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        beside.replace(self.out)


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per workload: tokens/s of each contestant, ratios round by round of each pair that was run together, and what was
    computed and stored per token of the samples (sharing or the cache leave less than 1 to compute).
    """
    made: dict[str, Any] = {}
    for name in dict.fromkeys(found["workload"] for found in rounds):
        rates: dict[str, dict[int, float]] = {}
        counted: dict[str, dict[str, float]] = {}
        for found in rounds:
            if found["workload"] == name:
                rates.setdefault(found["contestant"], {})[found["round"]] = found["tokens_per_s"]
                counted[found["contestant"]] = {
                    f"{what}_per_token": found[what] / found["tokens"] for what in ("computed", "bytes")
                }
        made[name] = {
            "counted": counted,
            "tokens_per_s": {who: _spread(list(by.values())) for who, by in rates.items()},
            "ratios": {
                f"{one} / {other}": _spread([rates[one][n] / rates[other][n] for n in rates[one] if n in rates[other]])
                for one in rates
                for other in rates
                if one != other and not one.startswith("prefill") and set(rates[one]) & set(rates[other])
            },
        }
    return made


def _spread(values: list[float]) -> dict[str, Any]:
    return {"median": median(values), "min": min(values), "max": max(values), "rounds": len(values)}


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

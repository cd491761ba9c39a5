"""What the fault suite counted: one line per case in a journal, summed by family into a result file.

The journal is ``.cache/faults/<mode>.jsonl``; the last line of a case counts, so that a run can be taken up again. The
full suite's sums go to ``benchmarks/results/faults.json``, from which ``scripts/reliability.py`` makes
``docs/reliability.md``; the short form's to ``.cache/faults/short.json``.

Any test may add lines::

    record.add("hostile: names", case="newlines", cases=12, injected=12, passed=12, seconds=0.3, what="names with ...")
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
CACHE = ROOT / ".cache" / "faults"
MODES = ("short", "full")
COUNTS = ("cases", "injected", "passed", "failed", "completed", "refused", "versions", "unreferenced", "orphans")
"""Summed over the cases of a family.

``completed`` runs that came to their end by themselves, ``refused`` ended with a clear message and were run again,
``versions`` published and verified, ``unreferenced`` objects left that gc found, ``orphans`` processes left behind.
"""


def mode() -> str:
    """ "short" or "full", from the environment."""
    found = os.environ.get("FAULTS", "full")
    if found not in MODES:
        raise SystemExit(f"FAULTS={found}: give one of {', '.join(MODES)}")
    return found


def journal() -> Path:
    """The file of this mode's lines."""
    return CACHE / f"{mode()}.jsonl"


def add(
    family: str,
    *,
    case: str = "",
    cases: int = 1,
    injected: int = 0,
    passed: int | None = None,
    failed: int = 0,
    seconds: float = 0.0,
    notes: str = "",
    what: str = "",
    **more: Any,
) -> dict[str, Any]:
    """Add a line.

    Args:
        family: the row of the table.
        case: name of the case inside its family; a later line of the same name replaces this one.
        cases: how many cases this line stands for.
        injected: faults injected.
        passed: cases that passed; by default all that did not fail.
        failed: cases that failed.
        seconds: how long they took.
        notes: what a reader of the table should know.
        what: what was injected, in a few words.
        more: further counts (see ``COUNTS``), and whatever else is worth keeping in the journal.
    """
    line = {
        "family": family,
        "case": case,
        "what": what,
        "cases": cases,
        "injected": injected,
        "passed": cases - failed if passed is None else passed,
        "failed": failed,
        "seconds": round(seconds, 1),
        "notes": notes,
        **more,
    }
    path = journal()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:  # in one piece: files of the suite may run at once
        file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
    return line


def lines() -> list[dict[str, Any]]:
    """The journal, each case once."""
    if not journal().exists():
        return []
    found = {}
    for text in journal().read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        found[line["family"], line["case"]] = line
    return list(found.values())


def forget(cases: set[tuple[str, str]]) -> None:
    """Take the lines of these (module, case) out of the journal; at once, since each worker of pytest-xdist does it."""
    stay = [line for line in lines() if (line.get("module"), line["case"]) not in cases]
    scratch = journal().with_suffix(f".{os.getpid()}")
    scratch.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in stay), encoding="utf-8")
    scratch.replace(journal())


def summed(items: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """One entry per family, in the order of their first lines."""
    families: dict[str, dict[str, Any]] = {}
    for line in items:
        entry = families.setdefault(
            line["family"],
            {"family": line["family"], "what": "", **dict.fromkeys(COUNTS, 0), "seconds": 0.0, "notes": ""},
        )
        for name in COUNTS:
            entry[name] += int(line.get(name, 0))
        entry["seconds"] = round(entry["seconds"] + line["seconds"], 1)
        for name in ("what", "notes"):
            if line[name] and line[name] not in entry[name]:
                entry[name] = "; ".join(filter(None, [entry[name], line[name]]))
    return families


def write() -> Path:
    """Write the sums; families of earlier runs that this journal does not have stay."""
    path = RESULTS if mode() == "full" else CACHE / "short.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    families = {**before.get("families", {}), **summed(lines())}
    document = {
        "mode": mode(),
        "measured": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.system()},
        "families": families,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path

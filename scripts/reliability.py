"""Make docs/reliability.md from what the fault suite measured: ``reliability.py [--check]``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
SOAK = ROOT / "benchmarks" / "results" / "soak.json"
NOTE = ROOT / "benchmarks" / "results" / "faults-note.md"
"""By hand: what of the suite was not run in this measurement, and why."""
PAGE = ROOT / "docs" / "reliability.md"

HEAD = """\
# Reliability

Measured by the fault suite; this page is made by `scripts/reliability.py` from `benchmarks/results/`, and not edited by
hand.

    make faults                        # all of it, hours on two cores; RESUME=1 goes on after an interruption
    make faults FAULTS=short           # a few minutes, part of CI
    make faults FAMILY="s3 disks"      # some of it: kills, s3, s3_engine, disks, flips, races, hostile
    make soak                          # 45 minutes of extraction under random faults

Every case ends in the same checks (`tests/faults/kit.py`):

- the job comes to its end, or fails with a message that says why (never a Python traceback), and the same command then
  goes on to the end;
- every published version verifies: all checksums, counts and invariants, every sample read back;
- the accounting closes: input = published + duplicates + dropped + quarantined;
- no process is left behind;
- nothing is left in the spool, and `gc` finds every object and unfinished upload that nothing refers to: what is listed
  is compared with what the records name, before and after a collection.

The S3 servers are moto and Ceph's radosgw (`tests/faults/radosgw.py`), behind a proxy that fails on purpose
(`tests/faults/proxy.py`). In the families "kills", "stopped engine" and "S3, engine" rows come from a real vLLM engine;
in the others a generator of random rows stands in its place, so that many more operations can be put through faults.

"by itself" counts runs that reached their end, "refused" those that ended with a clear message and were run again.
"""


def table(families: dict[str, dict[str, Any]]) -> str:
    """A row per family."""
    names = ("cases", "injected", "passed", "failed", "completed", "refused", "versions", "unreferenced", "orphans")
    titles = (
        "cases",
        "faults",
        "passed",
        "failed",
        "by itself",
        "refused",
        "versions verified",
        "found by gc",
        "orphans",
    )
    lines = [
        f"| family | what was injected | {' | '.join(titles)} | time |",
        f"|---|---|{'---:|' * (len(titles) + 1)}",
    ]
    total = dict.fromkeys((*names, "seconds"), 0.0)
    for family in families.values():
        counts = [f"{int(family.get(name, 0)):,}" for name in names]
        lines.append(
            f"| {_cell(family['family'])} | {_cell(family.get('what', ''))} | {' | '.join(counts)} | "
            f"{duration(family['seconds'])} |"
        )
        for name in total:
            total[name] += family.get(name, 0)
    counts = [f"{int(total[name]):,}" for name in names]
    lines.append(f"| **all** | | {' | '.join(counts)} | {duration(total['seconds'])} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def notes(families: dict[str, dict[str, Any]]) -> str:
    """What the families have to say beside their counts."""
    return "\n".join(f"- {_cell(f['family'])}: {_cell(f['notes'])}." for f in families.values() if f.get("notes"))


def soak(document: dict[str, Any]) -> str:
    """The soak's figures."""
    rows = [
        f"| {name} | {line['first']:,.0f} | {line['last']:,.0f} | {line['slope_per_hour']:+,.1f} | "
        f"{line['limit_per_hour']:,.1f} | {'yes' if line['flat'] else 'NO'} |"
        for name, line in document["lines"].items()
    ]
    faults = ", ".join(f"{count:,} {name}" for name, count in document["faults"].items())
    return "\n".join(
        [
            "## Soak",
            "",
            f"{document['minutes']:.0f} minutes of jobs one after another in one process ({document['jobs']} jobs, "
            f"{document['tokens']:,} tokens, {document['versions']} versions verified), on the CPU, with faults at "
            f"random: {faults}. Straight lines fitted to samples taken every {document['interval_s']:.0f} s, after "
            f"{document['warm_up_s']:.0f} s of warm-up:",
            "",
            "| | fitted at the start | at the end | slope an hour | limit | flat |",
            "|---|---:|---:|---:|---:|---|",
            *rows,
            *(["", document["note"]] if document.get("note") else []),
        ]
    )


def page() -> str:
    """The whole page.

    Raises:
        FileNotFoundError: the suite was not run.
    """
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    families = dict(sorted(document["families"].items()))
    machine = document["machine"]
    parts = [
        HEAD,
        f"## Results\n\nMeasured {document['measured']} on {machine['cpus']} cores, Python {machine['python']}.\n",
        table(families),
    ]
    if text := notes(families):
        parts.append(f"\nNotes:\n\n{text}")
    if NOTE.exists():
        parts.append("\n" + NOTE.read_text(encoding="utf-8").rstrip())
    if SOAK.exists():
        parts.append("\n" + soak(json.loads(SOAK.read_text(encoding="utf-8"))))
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 where the page is not what it should be"
    )
    chosen = parser.parse_args()
    if not RESULTS.exists():
        print(f"{RESULTS.relative_to(ROOT)} is not there; run 'make faults' first", file=sys.stderr)
        return 1
    text = page()
    if chosen.check:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

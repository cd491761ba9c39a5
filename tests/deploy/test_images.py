"""Dockerfiles: linted, complete, and installing what scripts/bootstrap.py installs."""

import ast
import json
import re
import shlex
import subprocess
import sys

import lock
import pytest

from tests.deploy import kit

pytestmark = pytest.mark.parametrize("dockerfile", kit.DOCKERFILES, ids=lambda path: path.stem)
LOCK_OF = {"cpu": "cpu", "gpu": "cuda", "server": "server"}


def test_hadolint_finds_nothing(dockerfile):
    hadolint = str(kit.Path(sys.executable).with_name("hadolint"))
    done = subprocess.run([hadolint, "--no-color", dockerfile], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_ignored_finding_has_its_reason_above_it(dockerfile):
    lines = dockerfile.read_text().splitlines()
    ignored = [number for number, line in enumerate(lines) if "hadolint ignore" in line]
    assert all(lines[number - 1].startswith("# ") and len(lines[number - 1]) > 20 for number in ignored)


def test_what_is_copied_is_in_git_and_reaches_the_builder(dockerfile):
    for rest in kit.said(dockerfile, "COPY"):
        *sources, _ = rest.split()
        for source in sources:
            files = kit.in_git(source)
            assert files, f"COPY {source}: no such file in git"
            assert all(kit.sent_to_builder(name) for name in files), f".dockerignore keeps {source} from the builder"


def test_nothing_else_reaches_the_builder(dockerfile):
    copied = {source for path in kit.DOCKERFILES for rest in kit.said(path, "COPY") for source in rest.split()[:-1]}
    sent = [name for name in kit.in_git(".") if kit.sent_to_builder(name)]
    stray = [name for name in sent if not any(name == source or name.startswith(f"{source}/") for source in copied)]
    assert [name for name in stray if not name.startswith("requirements/")] == []


def bootstrap_flags() -> set[str]:
    """Flags of the pip line with which scripts/bootstrap.py installs a lock."""
    tree = ast.parse((kit.ROOT / "scripts" / "bootstrap.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    lines = [[item.value for item in call.args if isinstance(item, ast.Constant)] for call in calls]
    (flags,) = [set(line) for line in lines if "install" in line and "-r" in line]
    return flags


def test_packages_come_from_a_lock_as_bootstrap_installs_it(dockerfile):
    wanted = f"requirements/{LOCK_OF[dockerfile.stem]}.lock"
    lines = [shlex.split(part) for rest in kit.said(dockerfile, "RUN") for part in rest.split("&&") if "pip" in part]
    (line,) = [line for line in lines if "-r" in line]
    assert line[-1] == wanted and lock.parse_lock((kit.ROOT / wanted).read_text())
    assert set(line) - {"python", wanted} - bootstrap_flags() == {"--no-cache-dir"}
    assert bootstrap_flags() <= set(line)
    for other in lines:
        assert "--no-deps" in other, f"{' '.join(other)} would install what no lock names"


def test_runs_as_a_numbered_user_under_an_init_with_a_health_check(dockerfile):
    names = [name for name, _ in kit.instructions(dockerfile)]
    (user,) = kit.said(dockerfile, "USER")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user), "Kubernetes' runAsNonRoot needs a number"
    assert names.index("USER") > max(number for number, name in enumerate(names) if name in ("RUN", "COPY"))
    assert json.loads(kit.said(dockerfile, "ENTRYPOINT")[0]) == ["tini", "--"]
    assert any("tini" in rest.split() for rest in kit.said(dockerfile, "RUN"))
    (check,) = kit.said(dockerfile, "HEALTHCHECK")
    script = json.loads(check.partition("CMD ")[2])[1]
    assert script.removeprefix("/app/") in " ".join(kit.said(dockerfile, "COPY"))


def test_a_worker_never_makes_a_pool_without_limits(dockerfile):
    command = json.loads(kit.said(dockerfile, "CMD")[0])
    assert command[0] == "prefect"
    if "worker" in command:
        assert "--no-create-pool-if-not-found" in command and "--with-healthcheck" in command


def test_no_secret_and_no_registry_is_written_down(dockerfile):
    text = dockerfile.read_text()
    assert not re.search(r"https?://(?!127\.0\.0\.1)", text)
    for name, value in kit.environment(dockerfile).items():
        assert not re.search(r"PASSWORD|TOKEN|AUTH_STRING|SECRET|KEY", name), f"{name}={value}"


def test_all_locks_hold_the_same_prefect(dockerfile):
    pins = {
        name: lock.parse_lock((kit.ROOT / "requirements" / f"{name}.lock").read_text()) for name in LOCK_OF.values()
    }
    assert {pin["prefect"] for pin in pins.values()} == {pins["cpu"]["prefect"]}
    differ = {name for name in pins["server"].keys() & pins["cpu"].keys() if pins["server"][name] != pins["cpu"][name]}
    assert differ == set(), "remake with: scripts/lock.py --hold requirements/cpu.lock server"

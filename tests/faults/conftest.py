"""Modes, servers and the record of each case; see ``record.py`` for where the counts go.

``FAULTS=short`` or ``full`` says how many cases there are, ``FAULTS_RESUME=1`` leaves out cases that the journal says
passed, ``REQUIRE_SYSTEM=1`` fails what would be skipped for want of a Debian package.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.faults import kit, record, servers

_REPORT = pytest.StashKey[pytest.TestReport]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The short form leaves cases out; a run forgets what it will do again, one that resumes leaves out what passed."""
    if not kit.full():
        left_out = [item for item in items if item.get_closest_marker("only_full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if config.option.collectonly:
        return
    suite = {item.nodeid: _key(item) for item in items if Path(__file__).parent in item.path.parents}
    if os.environ.get("FAULTS_RESUME"):
        done = {(line.get("module"), line["case"]) for line in record.lines() if not line["failed"]}
        kept = [item for item in items if suite.get(item.nodeid) not in done]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    elif record.journal().exists():
        record.forget(set(suite.values()))


def _key(item: pytest.Item) -> tuple[str, str]:
    return item.path.stem, item.name


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    outcome = yield
    if call.when == "call":
        item.stash[_REPORT] = outcome.get_result()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # of pytest-xdist: whoever started it writes the sums, once
    if not session.config.option.collectonly and record.lines():
        record.write()


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[kit.Case]:
    """The case of this test; what it counts is recorded whether it passes or not."""
    module = request.module
    found = kit.Case(module.FAMILY, request.node.name, tmp_path, what=getattr(module, "WHAT", ""))
    found.module = request.node.path.stem
    started = time.monotonic()
    try:
        yield found
    finally:
        found.kill_all()
    report = request.node.stash.get(_REPORT, None)
    if report is not None and not report.skipped:
        found.record(passed=report.passed, seconds=time.monotonic() - started)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with blocks small enough that shards are a matter of samples."""
    return tiny.make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def server() -> Iterator[Callable[[str], servers.Server]]:
    """``server("moto")`` or ``server("radosgw")``: a running server, the same for the whole session."""
    running: dict[str, servers.Server] = {}

    def get(name: str) -> servers.Server:
        if name not in running:
            if reason := servers.missing(name):
                if os.environ.get("REQUIRE_SYSTEM"):
                    pytest.fail(f"{name} cannot run here: {reason}")
                pytest.skip(f"{name} cannot run here: {reason}")
            running[name] = servers.start(name)
        return running[name]

    yield get
    for item in running.values():
        item.stop()


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)

"""What every test may use.

Unit tests need neither model nor chats; a test that asks for ``demo_model`` is marked ``engine``, ``slow`` or ``e2e``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from examples.demo import prepare
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """A Prefect home of this process, before Prefect is imported: files that run at once must not share a database."""
    home = os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="coresample-prefect-")
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))


@pytest.fixture(scope="session", autouse=True)
def _no_outside_world() -> None:
    """No test may reach a model hub or send usage statistics, and none may depend on this machine's settings."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"})
    for name in [name for name in os.environ if name.startswith("CORESAMPLE_")]:
        del os.environ[name]


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """Folder of the demo's inputs, kept between runs so that the model is converted once per checkout."""
    return ROOT / prepare.DEFAULT_DIR


@pytest.fixture(scope="session")
def demo_model(demo_dir: Path) -> Path:
    """Checkpoint of SmolLM2-135M-Instruct in bfloat16: 30 blocks, hidden size 576, ChatML template."""
    try:
        return prepare.prepare_model(demo_dir)
    except prepare.PrepareError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a random Llama of 4 blocks with a tokenizer (tests/tiny.py); not to be changed."""
    return tiny.make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def sharegpt(demo_dir: Path) -> Callable[[int], Path]:
    """``sharegpt(n)``: a JSONL of the first n usable real ShareGPT conversations (at most 11,157)."""

    def make(n: int) -> Path:
        path = demo_dir / f"sharegpt-{n}.jsonl"
        if not path.exists():
            prepare.write_chats(path, n)
        return path

    return make


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that may take longest come first where several run at once (``JOBS=2``), so that none is left for the end.

    Their own time limits say which; files and the tests of a file keep their order otherwise.
    """
    if not hasattr(config, "workerinput"):
        return
    limits: dict[Path, float] = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        limits[item.path] = max(limits.get(item.path, 0.0), float(marker.args[0]) if marker else 0.0)
    items.sort(key=lambda item: -limits[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With ``REQUIRE_SYSTEM`` set, a test marked ``system`` must run: its packages were installed for it."""
    report = yield
    if report.skipped and item.get_closest_marker("system") and os.environ.get("REQUIRE_SYSTEM"):
        report.outcome = "failed"
        report.longrepr = f"REQUIRE_SYSTEM is set, but the test was skipped: {report.longrepr}"
    return report


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The compatibility and fault suites run where they are named: ``make compat`` and ``make faults``."""
    for suite in ("compat", "faults"):
        if collection_path == Path(__file__).parent / suite and not any(suite in arg for arg in config.args):
            return True
    return None

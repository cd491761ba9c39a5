"""Counts the cases of this folder for docs/reliability.md; the fuzzer counts its inputs itself."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import record

WHAT = {
    "test_templates": "templates that do not end, swell, or pry",
    "test_store": "links, places elsewhere, pipes, files that claim to be huge",
    "test_data": "bombs, damaged Arrow, pickles, links out of a dataset",
    "test_output": "names with escapes, control characters, text direction, surrogates",
    "test_properties": "properties of shards, encodings, layouts, records, versions",
}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    outcome = yield
    report = outcome.get_result()
    what = WHAT.get(item.path.stem)
    if report.when == "call" and what is not None and Path(__file__).parent in item.path.parents:
        record.add(
            "hostile input",
            case=f"{item.path.stem}::{item.name.encode('unicode_escape').decode()}",
            injected=1,
            failed=int(report.failed),
            seconds=report.duration,
            what=what,
        )

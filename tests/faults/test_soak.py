"""The soak in its short form; ``make soak`` is the long one."""

from __future__ import annotations

import json

import pytest

from tests.faults import kit

FAMILY = "soak"
WHAT = "engines and workers killed, requests failed, at random"
MINUTES = 8 if kit.full() else 2
pytestmark = [pytest.mark.engine, pytest.mark.timeout(MINUTES * 60 + 600)]


def test_soak(case) -> None:
    result = case.folder / "soak.json"
    words = ("--minutes", str(MINUTES), "--interval", "2", "--json", str(result))
    outcome = case.finish(case.start(*words, module="tests.faults.soak"), MINUTES * 60 + 500)
    assert outcome.code == 0, outcome.text[-6000:]
    figures = json.loads(result.read_text())
    case.injected = sum(figures["faults"].values())
    case.completed, case.versions = figures["jobs"], figures["versions"]
    case.detail = {name: line["slope_per_hour"] for name, line in figures["lines"].items()}
    case.no_orphans()

"""The fuzzer in short: every parser, few inputs. ``python -m tests.faults.hostile.fuzz`` is the long form."""

from __future__ import annotations

import os

import pytest

from tests.faults.hostile.fuzz import add_record, fuzz
from tests.faults.hostile.parsers import PARSERS

COUNT = int(os.environ.get("FUZZ_COUNT") or (200 if os.environ.get("FAULTS") == "short" else 2000))
SEED = 2
OFTEN_REFUSED = {"engine message"}  # a message is always followed by the end


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_raises_what_it_documents_and_soon(name: str) -> None:
    outcome = fuzz(name, COUNT, SEED, seconds=280)
    add_record(outcome)
    assert not outcome.failures, outcome.failures
    assert outcome.accepted > 0 or name in OFTEN_REFUSED, "not even the real files are read: the fuzzing shows nothing"

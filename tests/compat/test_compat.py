"""Every family and way of capture on the installed vLLM; ``make compat`` runs it in an environment per version.

A cell is measured by ``cells.measure``: the rows of every reachable layer against Hugging Face in one batch, in chunks
and one prompt at a time, with the prefix cache on and off; block hashes against vLLM's own; greedy tokens against
``argmax(lm_head(norm(h_n)))``.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_rows_equal_hugging_face(measured, family: str, mode: str) -> None:
    cell = measured[family, mode].result()
    if cell.status == "unsupported":
        pytest.skip(f"unsupported by this vLLM: {cell.reason}")
    if mode == "native" and cell.status == "refused":
        # The class has no native states: said before any row, with the way out. "auto" then takes hooks, and must work.
        assert cell.reason.endswith("set engine.capture to auto or hooks")
        return
    assert cell.status == "works", cell.reason

"""Trying again what may pass: the store was unavailable, an engine was replaced. One policy for loop and flows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from extract_core.errors import CoresampleError
from extract_core.progress import reporter

T = TypeVar("T")

RETRIES = 3
"""Tries after the first, for failures that may pass (store unavailable, engine replaced)."""
RETRY_DELAYS_S = (2.0, 10.0, 30.0)


def is_retryable(error: BaseException) -> bool:
    """Whether trying the same again may help."""
    return isinstance(error, CoresampleError) and error.retryable


def with_retries(step: Callable[[], T], *, delays_s: tuple[float, ...] = RETRY_DELAYS_S) -> T:
    """Call a step, again after a delay when its failure may pass."""
    for delay in delays_s:
        try:
            return step()
        except CoresampleError as error:
            if not error.retryable:
                raise
            reporter().note(f"{error}; trying again in {delay:.0f} s")
            time.sleep(delay)
    return step()

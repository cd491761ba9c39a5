"""When a request to a store is tried again: the one policy of all clients and operations.

The clients' own retries are switched off (see ``Root``), because stacked policies multiply: botocore's five tries in
s3fs's five in ours would wait for a dead server for minutes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from extract_core.store.failures import is_transient

T = TypeVar("T")


@dataclass(frozen=True)
class Retry:
    """How often and how soon.

    Args:
        tries: of one request, the first included.
        first_s: longest wait before the second try; it doubles from try to try.
        most_s: longest wait at all.
    """

    tries: int = 7
    first_s: float = 0.25
    most_s: float = 8.0

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Retry:
        """The policy for fsspec options: ``config_kwargs.retries``, as botocore reads it, sets the number of tries."""
        retries = (options.get("config_kwargs") or {}).get("retries") or {}
        if (total := retries.get("total_max_attempts")) is not None:
            return cls(tries=max(1, int(total)))
        if (more := retries.get("max_attempts")) is not None:
            return cls(tries=max(0, int(more)) + 1)
        return cls()

    def waits(self) -> Iterator[float]:
        """Seconds to wait after each failed try but the last: half of the step is random, so that clients spread."""
        for tried in range(self.tries - 1):
            yield random.uniform(0.5, 1.0) * min(self.most_s, self.first_s * 2**tried)

    def call(self, request: Callable[[], T], *, transient: Callable[[BaseException], bool] = is_transient) -> T:
        """Make a request, again while its failure may pass; raises what the last try raised.

        Args:
            request: must be safe to repeat.
            transient: which failures may pass.
        """
        for wait in self.waits():
            try:
                return request()
            except Exception as error:
                if not transient(error):
                    raise
                time.sleep(wait)
        return request()

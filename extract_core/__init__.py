"""Everything of Coresample that is neither a Prefect flow nor a Prefect task.

``settings`` a job -> ``job.prepare`` checks and plans it -> ``pipeline`` captures, commits, validates and publishes it
-> ``store`` holds it -> ``reader`` and ``cli`` give it back. Only ``engine`` imports vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from extract_core.reader import HiddenStatesDataset as HiddenStatesDataset

__all__ = ["HiddenStatesDataset"]


def __getattr__(name: str) -> Any:
    """``extract_core.HiddenStatesDataset``, imported when it is asked for: torch takes a second."""
    if name == "HiddenStatesDataset":
        from extract_core.reader import HiddenStatesDataset

        return HiddenStatesDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

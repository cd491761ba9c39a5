"""The steps of a run, each one call: preflight, capture a shard, commit it, validate everything, publish.

Flows and the plain loop in ``local.py`` order these calls; nothing here knows who calls. Every step is safe to repeat:
a shard with a commit record is not extracted again, a published plan is not published twice.
"""

from __future__ import annotations

from extract_core.pipeline.capture import Captured, capture_shard, make_supervisor, open_shards, preflight
from extract_core.pipeline.commit import commit_shard
from extract_core.pipeline.publish import account, publish, validate

__all__ = [
    "Captured",
    "account",
    "capture_shard",
    "commit_shard",
    "make_supervisor",
    "open_shards",
    "preflight",
    "publish",
    "validate",
]

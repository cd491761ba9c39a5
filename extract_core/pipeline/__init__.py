"""The steps of a run, each one call: preflight, capture a shard, commit it, validate everything, publish.

Flows and the plain loop in ``local.py`` order these calls; nothing here knows who calls. Every step is safe to repeat:
a shard with a commit record is not extracted again, a published plan is not published twice.
"""

from __future__ import annotations

from extract_core.pipeline.capture import Captured, capture_shard, make_supervisor, preflight
from extract_core.pipeline.commit import commit_shard
from extract_core.pipeline.publish import account, publish, validate
from extract_core.pipeline.todo import (
    SOUND,
    Damage,
    ShardTask,
    Work,
    find_damage,
    open_shards,
    outstanding,
    settled,
)

__all__ = [
    "SOUND",
    "Captured",
    "Damage",
    "ShardTask",
    "Work",
    "account",
    "capture_shard",
    "commit_shard",
    "find_damage",
    "make_supervisor",
    "open_shards",
    "outstanding",
    "preflight",
    "publish",
    "settled",
    "validate",
]

"""Prefect flows: order, fan-out, retries, artifacts. No logic of their own.

Prefect reads its settings when it is imported, so the ones that a run on one machine needs are set here, before any
flow module is; a variable that is set already wins.
"""

import os

# The private server of a run without PREFECT_API_URL needs longer than Prefect's 20 s where two cores are busy.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
# No usage statistics are sent; the session record for them also collides with the flow's first writes on SQLite.
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")

"""What Prefect's server watches on its own: dead runs, failures, progress that stops, datasets that stay incomplete.

Made by ``python -m flows.bootstrap``, and again whenever it runs. Without a notification block an automation only
leaves its event in the UI's feed; ``--notify BLOCK`` (such as ``slack-webhook/team``) sends a message as well.
"""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, ChangeFlowRunState, DoNothing, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from flows.parent import TAG

HEARTBEAT_S = 30
"""PREFECT_FLOWS_HEARTBEAT_FREQUENCY of the deployments in prefect.yaml."""
DEAD_AFTER = timedelta(minutes=20)
"""Longer than any outage of the server that runs are to survive: after a restart, Prefect judges by heartbeats that it
could not receive. Parents look after their own workers sooner (``flows/fanout.py``); this is for everything else."""
PENDING = timedelta(hours=1)
"""Pulling a large image onto a new node may take most of it."""
PREFIX = "coresample: "

_TAGGED = ResourceSpecification({"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"})
_RUNS = ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]})


def automations(notify: UUID | None, *, stall: timedelta) -> list[AutomationCore]:
    """All of them.

    Args:
        notify: id of a notification block.
        stall: a running extraction that commits nothing for so long has stalled.
    """

    def told(subject: str, body: str) -> list[ActionTypes]:
        if notify is None:
            return [DoNothing()]
        return [SendNotification(block_document_id=notify, subject=subject, body=body)]

    run = "{{ flow_run.name }} ({{ flow_run|ui_url }})"
    return [
        AutomationCore(
            name=f"{PREFIX}a run without heartbeat has crashed",
            description="A worker or its machine died; the parent gives its shards to another.",
            trigger=EventTrigger(
                after={"prefect.flow-run.heartbeat"},
                expect={"prefect.flow-run.*"},
                match=_RUNS,
                match_related=_TAGGED,
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=DEAD_AFTER,
            ),
            actions=[
                ChangeFlowRunState(
                    state=StateType.CRASHED, message=f"no heartbeat for {DEAD_AFTER.total_seconds() / 60:.0f} minutes"
                )
            ],
        ),
        AutomationCore(
            name=f"{PREFIX}a run that was taken and never began has crashed",
            description="Its machine died between the two; it would hold its slot for ever.",
            trigger=EventTrigger(
                after={"prefect.flow-run.Pending"},
                expect={"prefect.flow-run.*"},
                match=_RUNS,
                match_related=_TAGGED,
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=PENDING,
            ),
            actions=[ChangeFlowRunState(state=StateType.CRASHED, message="taken by a worker, and never began")],
        ),
        AutomationCore(
            name=f"{PREFIX}an extraction failed",
            description="The run's logs list the root causes of its workers.",
            trigger=EventTrigger(
                expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
                match=_RUNS,
                match_related=_TAGGED,
                posture=Posture.Reactive,
                threshold=1,
            ),
            actions=told("Coresample: a run failed", f"{run}: {{{{ flow_run.state.message }}}}"),
        ),
        AutomationCore(
            name=f"{PREFIX}progress has stopped",
            description="Workers report every shard that they commit; none came for too long.",
            trigger=EventTrigger(
                after={"coresample.extraction.started", "coresample.extraction.progress"},
                expect={f"coresample.extraction.{what}" for what in ("started", "progress", "ended")},
                match=ResourceSpecification({"prefect.resource.id": ["coresample.dataset.*"]}),
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=stall,
            ),
            actions=told("Coresample: no progress", "{{ event.resource.id }}: no shard was committed"),
        ),
        AutomationCore(
            name=f"{PREFIX}a dataset is incomplete",
            description="Too many rows are malformed or quarantined for the job's completeness; nothing was published.",
            trigger=EventTrigger(
                expect={"coresample.extraction.incomplete"},
                match=ResourceSpecification({"prefect.resource.id": ["coresample.dataset.*"]}),
                posture=Posture.Reactive,
                threshold=1,
            ),
            actions=told("Coresample: below the completeness threshold", "{{ event.payload.reason }}"),
        ),
    ]


def apply(wanted: list[AutomationCore]) -> list[str]:
    """Create what is missing and bring the others up to date; returns a line for each."""
    from prefect.client.orchestration import get_client

    lines = []
    with get_client(sync_client=True) as client:
        for automation in wanted:
            there = client.read_automations_by_name(automation.name)
            for old in there:
                client.delete_automation(old.id)
            client.create_automation(automation)
            lines.append(f"automation {automation.name!r} {'renewed' if there else 'created'}")
    return lines

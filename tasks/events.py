"""Events that other flows and automations react to: checkpoints, evaluations, aliases.

An event is sent while the caller waits: what was announced is stored by the server. Its id derives from what it tells,
so telling it again (a restarted run does) is no second event.
"""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid5

from prefect.client.orchestration import get_client
from prefect.events.schemas.events import Event, RelatedResource, Resource
from prefect.utilities.context import get_task_and_flow_run_ids

from skyrl_core.data.digests import digest_of

logger = logging.getLogger(__name__)

CHECKPOINT_SAVED = "checkpoint.saved"
CHECKPOINT_EVALUATED = "checkpoint.evaluated"
BELOW_THRESHOLD = "evaluation.below_threshold"
ALIAS_MOVED = "alias.moved"
_NAMESPACE = UUID("5d4b2b8e-6f0c-4c56-9a56-0d0b3f1f4c11")


def send_event(event: str, *, kind: str, name: str, payload: Mapping[str, Any], key: str = "") -> bool:
    """Send one event about the resource `skyrl.<kind>.<name>`; False, with a warning, when the API did not take it.

    `key` tells equal events apart that are meant twice; the payload does so by itself.
    """
    flow_run_id = get_task_and_flow_run_ids()[1]
    related = []
    if flow_run_id is not None:
        flow_run = {"prefect.resource.id": f"prefect.flow-run.{flow_run_id}", "prefect.resource.role": "flow-run"}
        related.append(RelatedResource(flow_run))
    made = Event(
        id=uuid5(_NAMESPACE, digest_of({"event": event, "name": name, "payload": dict(payload), "key": key})),
        occurred=datetime.now(UTC),
        event=event,
        resource=Resource({"prefect.resource.id": f"skyrl.{kind}.{name}", "prefect.resource.name": name}),
        related=related,
        payload=dict(payload),
    )
    try:
        with get_client(sync_client=True) as client:
            client.request("POST", "/events", json=[made.model_dump(mode="json")])
    except Exception as error:  # whoever listens hears of it later; the work itself must not end for it
        logger.warning("event %s of %s was not sent: %s: %s", event, name, type(error).__name__, error)
        return False
    return True

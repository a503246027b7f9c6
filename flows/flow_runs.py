"""What the flows say about flow runs to the Prefect API: what they are called, and that a killed one has ended."""

import logging
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run
from prefect.states import Crashed, State

logger = logging.getLogger(__name__)


def name_flow_run(name: str) -> None:
    """Give the present flow run a name that tells what it works on."""
    if flow_run.id:
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run.id, name=name)


def close_killed(killed: str, message: str) -> None:
    """Mark a flow run whose process was killed, and its running subflows, as crashed: nobody else can say so."""
    crashed: State[Any] = Crashed(message=message)
    below = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[UUID(killed)]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING])),
    )
    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(killed, crashed, force=True)
            for subflow in client.read_flow_runs(flow_run_filter=below):
                client.set_flow_run_state(subflow.id, crashed, force=True)
    except Exception as error:  # another server's run, or one that was deleted: nothing to close here
        logger.warning("flow run %s of the killed predecessor could not be closed: %s", killed, error)

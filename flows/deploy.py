"""Puts work pool, queues, deployments and automations on a Prefect server. Doing it again updates them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.utilities.asyncutils import run_coro_as_sync
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type
from pydantic import ValidationError

from skyrl_core.errors import ConfigurationError, OrchestrationError

DEPLOYMENTS, AUTOMATIONS = "prefect.yaml", "automations.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """What is on the server now."""

    pool: str
    pool_created: bool
    queues: tuple[str, ...]
    deployments: tuple[str, ...]
    automations: tuple[str, ...]
    notifies: bool


def deploy(
    folder: Path, *, pool: str, pool_type: str = "process", workdir: str | None = None, notify: str | None = None
) -> Deployed:
    """Deploy what `folder` holds: prefect.yaml and automations.yaml.

    Args:
        pool: Work pool of all deployments; made when it is missing.
        pool_type: Its type then: `process` or `kubernetes`.
        workdir: Folder that runs start in on the workers' machines; None: the present one.
        notify: A notification block, as `slack-webhook/team`, for the automations' messages.

    Raises:
        ConfigurationError: a file is missing or malformed, or there is no such block.
        OrchestrationError: the server refused something.
    """
    project, automations = _read(folder / DEPLOYMENTS), _read(folder / AUTOMATIONS)
    queues = sorted({str(_pool_of(item)["work_queue_name"]) for item in project["deployments"]})
    with get_client(sync_client=True) as client:
        block = _block(client, notify) if notify is not None else None
        made = [_automation(spec, block) for spec in automations["automations"]]
        created = _ensure_pool(client, pool, pool_type)
        _prefect_deploy(project, pool, workdir or os.getcwd())
        for automation in made:
            _put_automation(client, automation)
    return Deployed(
        pool=pool,
        pool_created=created,
        queues=tuple(queues),
        deployments=tuple(str(item["name"]) for item in project["deployments"]),
        automations=tuple(automation.name for automation in made),
        notifies=block is not None,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}. Run `skyrl-flows deploy` in the repository's folder, or name "
            "the folder of the deployments with --folder."
        ) from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is no valid YAML: {error}") from error
    return dict(content)


def _pool_of(deployment: Mapping[str, Any]) -> dict[str, Any]:
    return dict(deployment["work_pool"])


def _ensure_pool(client: SyncPrefectClient, pool: str, pool_type: str) -> bool:
    try:
        client.read_work_pool(pool)
    except ObjectNotFound:
        template = run_coro_as_sync(get_default_base_job_template_for_infrastructure_type(pool_type))
        if template is None:
            raise ConfigurationError(f"there is no work pool type {pool_type!r}: use process or kubernetes") from None
        client.create_work_pool(WorkPoolCreate(name=pool, type=pool_type, base_job_template=template))
        return True
    return False


def _prefect_deploy(project: Mapping[str, Any], pool: str, workdir: str) -> None:
    """Prefect's own command, on the same file with pool and folder put in."""
    items = [{**item, "work_pool": {**_pool_of(item), "name": pool}} for item in project["deployments"]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / DEPLOYMENTS
        pull = [{"prefect.deployments.steps.set_working_directory": {"directory": workdir}}]
        content = {**{name: value for name, value in project.items() if name != "definitions"}, "pull": pull}
        file.write_text(yaml.safe_dump({**content, "deployments": items}), encoding="utf-8")
        result = subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])},
        )
    if result.returncode != 0:
        raise OrchestrationError(f"`prefect deploy` failed:\n{(result.stderr or result.stdout)[-2000:]}")


def _automation(spec: Mapping[str, Any], block: UUID | None) -> AutomationCore:
    """The automation with its `notify` actions made real."""
    actions = []
    for action in spec["actions"]:
        if action["type"] != "notify":
            actions.append(action)
        elif block is None:
            actions.append({"type": "do-nothing"})
        else:
            actions.append({**action, "type": "send-notification", "block_document_id": str(block)})
    try:
        return AutomationCore.model_validate({**spec, "actions": actions})
    except ValidationError as error:
        raise ConfigurationError(f"automation {spec.get('name')!r} in {AUTOMATIONS} is malformed: {error}") from error


def _put_automation(client: SyncPrefectClient, automation: AutomationCore) -> None:
    existing = client.read_automations_by_name(automation.name)
    if existing:
        client.update_automation(existing[0].id, automation)
    else:
        client.create_automation(automation)


def _block(client: SyncPrefectClient, name: str) -> UUID:
    slug, _, document = name.partition("/")
    try:
        return client.read_block_document_by_name(document, slug, include_secrets=False).id
    except ObjectNotFound:
        raise ConfigurationError(
            f"--notify {name}: there is no such block. Make it in the UI under Blocks, or with `prefect block`; then "
            "name it as type/name, for example slack-webhook/team."
        ) from None

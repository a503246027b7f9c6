"""`skyrl-flows deploy`: put deployments, queues and automations on the Prefect server of the team."""

import argparse
import os
from pathlib import Path

from flows.environment import prepare_this_process
from flows.server import ensure_server
from skyrl_core.errors import ConfigurationError


def run(args: argparse.Namespace) -> int:
    """Deploy, and say how to start the workers."""
    prepare_this_process(debug=args.debug)
    if not os.environ.get("PREFECT_API_URL"):
        raise ConfigurationError(
            "deployments need a Prefect server that stays: start one (`prefect server start`, or infra/compose.yaml) "
            "and set PREFECT_API_URL to its address, such as http://127.0.0.1:4200/api"
        )
    server = ensure_server()
    server.wait_ready(timeout=5.0)
    from flows.deploy import deploy

    done = deploy(Path(args.folder), pool=args.pool, pool_type=args.pool_type, workdir=args.workdir, notify=args.notify)
    print(f"Work pool   {done.pool}{' (made now)' if done.pool_created else ''}, queues {', '.join(done.queues)}")
    print(f"Deployments {', '.join(done.deployments)}")
    print(f"Automations {', '.join(done.automations)}")
    if not done.notifies:
        print("            they send no message: name a notification block with --notify to get one")
    print("Start a worker on each machine that is to work, in this folder:")
    for queue in done.queues:
        print(f"  prefect worker start --pool {done.pool} --work-queue {queue}")
    print(f"UI          {server.ui_url}/deployments")
    return 0

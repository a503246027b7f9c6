"""`skyrl-flows ui`: open the local Prefect server's pages again."""

import argparse
import time

from flows.server import ensure_server


def run(args: argparse.Namespace) -> int:
    """Serve the UI until interrupted."""
    server = ensure_server(args.port)
    try:
        server.wait_ready(120.0)
        print(f"Prefect UI: {server.ui_url}   (Ctrl-C to stop)", flush=True)
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return 0
    finally:
        if server.release():
            print("the local server is stopped")

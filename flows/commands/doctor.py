"""`skyrl-flows doctor`: look at everything in reach and say what to do."""

import argparse
import json
from dataclasses import asdict

from flows.doctor.checks import all_checks
from flows.doctor.report import findings_table, run_checks
from flows.environment import prepare_this_process
from skyrl_core.config import load_config


def run(args: argparse.Namespace) -> int:
    """One line a check. Exit code 1 when one of them fails, 0 with warnings only."""
    prepare_this_process(debug=args.debug)
    findings = run_checks(all_checks(load_config(args.config, args.overrides)))
    failed = [finding.check for finding in findings if finding.status == "fail"]
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        from rich.console import Console

        Console().print(findings_table(findings))
        print(f"\nto be repaired: {', '.join(failed)}" if failed else "\nready")
    return 1 if failed else 0

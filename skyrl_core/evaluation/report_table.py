"""An evaluation report as a table for the terminal."""

from rich.table import Table
from rich.text import Text

from skyrl_core.evaluation.metrics import EvalReport


def report_table(report: EvalReport) -> Table:
    """The report for a terminal: a row for each data source, and one for all when there are several."""
    rows = list(report.sources.items())
    if len(rows) != 1:
        rows.append(("all", report.overall))
    ks = sorted({k for _, scores in rows for k in scores.pass_at})
    table = Table("data source", "prompts", "score", "± s.e.", *(f"pass@{k}" for k in ks), "greedy", "failed")
    for source, scores in rows:
        table.add_row(
            Text(source),  # as it is: rich would read [brackets] as its markup
            str(scores.prompts),
            f"{scores.avg_score:.3f}",
            "" if scores.standard_error is None else f"{scores.standard_error:.3f}",
            *(f"{scores.pass_at[k]:.3f}" if k in scores.pass_at else "" for k in ks),
            "" if scores.greedy_score is None else f"{scores.greedy_score:.3f}",
            str(scores.failed),
        )
    return table

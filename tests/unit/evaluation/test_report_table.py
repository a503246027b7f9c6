"""The report in the terminal."""

import io
from collections.abc import Callable

import pytest

from skyrl_core.evaluation.metrics import EvalReport, SourceScores
from skyrl_core.evaluation.report_table import report_table

Shown = Callable[[EvalReport], list[list[str]]]


def _scores(
    avg_score: float, *, pass_at: dict[int, float], error: float | None = None, greedy: float | None = None
) -> SourceScores:
    return SourceScores(
        prompts=12,
        trajectories=48,
        failed=3,
        avg_score=avg_score,
        standard_error=error,
        mean_positive_reward=avg_score,
        pass_at=pass_at,
        avg_num_tokens=5.0,
        truncated_share=0.0,
        greedy_score=greedy,
    )


@pytest.fixture
def shown() -> Shown:
    def show(report: EvalReport) -> list[list[str]]:
        """The cells of every line that holds some, headings first."""
        from rich.console import Console

        written = io.StringIO()
        Console(width=120, file=written, color_system=None).print(report_table(report))
        lines = written.getvalue().replace("\u2503", "\u2502").splitlines()
        return [[cell.strip() for cell in line.strip("\u2502").split("\u2502")] for line in lines if "\u2502" in line]

    return show


def test_one_source_is_one_line_with_score_standard_error_and_pass_rates(shown: Shown):
    scores = _scores(0.4567, pass_at={1: 0.25, 4: 0.5}, error=0.0214, greedy=0.75)
    assert shown(EvalReport(overall=scores, sources={"gsm8k": scores})) == [
        ["data source", "prompts", "score", "± s.e.", "pass@1", "pass@4", "greedy", "failed"],
        ["gsm8k", "12", "0.457", "0.021", "0.250", "0.500", "0.750", "3"],
    ]


def test_several_sources_end_with_all_and_what_is_absent_stays_blank(shown: Shown):
    one, two = _scores(0.5, pass_at={1: 0.5}), _scores(1.0, pass_at={1: 1.0, 2: 1.0}, error=0.1)
    table = shown(EvalReport(overall=_scores(0.75, pass_at={1: 0.75, 2: 1.0}), sources={"a": one, "b": two}))
    assert table[1:] == [
        ["a", "12", "0.500", "", "0.500", "", "", "3"],
        ["b", "12", "1.000", "0.100", "1.000", "1.000", "", "3"],
        ["all", "12", "0.750", "", "0.750", "1.000", "", "3"],
    ]


def test_brackets_in_a_sources_name_are_no_markup(shown: Shown):
    scores = _scores(0.5, pass_at={1: 0.5})
    assert shown(EvalReport(overall=scores, sources={"sums[bold]": scores}))[1][0] == "sums[bold]"

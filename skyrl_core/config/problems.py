"""Problems found in a configuration, collected so that one error can name them all."""

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_core.errors import ConfigurationError, NotAvailableYetError


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong. `text` names key, value and remedy; `where` is the word or line that caused it."""

    text: str
    path: str = ""
    where: str = ""
    unavailable: bool = False

    def __str__(self) -> str:
        said = self.where.removeprefix("word ") in self.text
        return self.text if said else f"{self.text} ({self.where})"


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one error with a line for each problem; NotAvailableYetError when every one is a missing feature."""
    if not problems:
        return
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    text = lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems in the configuration:", *lines])
    if all(problem.unavailable for problem in problems):
        raise NotAvailableYetError(text)
    raise ConfigurationError(text)

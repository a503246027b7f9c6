"""A progress bar for recipes, where there is a terminal to draw it on."""

from collections.abc import Iterator
from contextlib import contextmanager

from skyrl_core.recipes.arithmetic_model import Progress


@contextmanager
def progress_bar(title: str, *, visible: bool = True) -> Iterator[Progress]:
    """A function to report progress to; it draws a bar named `title` on a terminal and nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True, disable=not (visible and console.is_terminal)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

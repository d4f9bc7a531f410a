"""A line on the terminal that shows how far a call is: what it does, and if known its share and the time left."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from lakeupsert import clock
from lakeupsert.phrases import duration
from lakeupsert.progress import Share


class _ShareColumn(ProgressColumn):
    """Share and time left; nothing as long as they are not known."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        of, left = "" if task.fields["whole"] else " of this step", task.time_remaining
        return Text(f"{task.percentage:.0f} %" + (of if left is None else f", about {duration(left)} left{of}"))


class _Line:
    """Changes the line. ``what``: the words that it always begins with."""

    def __init__(self, shown: Progress, what: str) -> None:
        self._shown, self._what = shown, what
        self._total: float | None = None
        self._task = shown.add_task(what, total=None, whole=False)

    def __call__(self, text: str) -> None:
        share = text if isinstance(text, Share) and text.total > 0 else None
        total = share.total if share else None
        if total != self._total:  # another step, which has a pace of its own
            self._shown.remove_task(self._task)
            self._task, self._total = self._shown.add_task(self._what, total=total, whole=False), total
        done, whole = (share.done, share.whole) if share else (0, False)
        description = f"{self._what}: {text}"
        self._shown.update(self._task, description=description, completed=done, whole=whole, refresh=True)


@contextmanager
def bar(what: str) -> Iterator[_Line]:
    """Show a line on standard error, which disappears at the end. The block gets what changes it."""
    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text, BarColumn(20), _ShareColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, get_time=clock.elapsed) as shown:
        yield _Line(shown, what)

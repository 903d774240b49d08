"""Progress on a terminal: a row for each long task, with its share and its time left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from kvgraph.progress import Advance, is_followed, listening

SHOWN_AFTER = 2.0
"""Seconds that a task must have run before its row is shown."""


@contextmanager
def show_progress() -> Iterator[None]:
    """Show the progress and remaining time of long tasks on stderr while the scope is open.

        with kvgraph.show_progress():
            completions = engine.generate(prompts)

    Only tasks of this thread are shown: generating, hashing, compiling, writing weights. Nothing
    is written if stderr is not a terminal; a scope inside another scope adds nothing.
    """
    if is_followed():
        yield
        return
    with Bars(Console(file=sys.stderr)):
        yield


class Bars(AbstractContextManager["Bars"]):
    """A progress listener while it is open. A stage is a row without a share, shown at once."""

    def __init__(self, console: Console) -> None:
        self._rows = _Rows(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            _Bar(bar_width=24),
            _Share(),
            console=console,
            transient=True,
        )
        self._is_shown = console.is_interactive  # otherwise rich writes an empty line
        self._scope = listening(self)
        self._stage = self._rows.add_task("", total=None, visible=False)

    def __enter__(self) -> Bars:
        if self._is_shown:
            self._rows.start()
        self._scope.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._scope.__exit__(None, None, None)
        if self._is_shown:
            self._rows.stop()

    def stage(self, text: str) -> None:
        self._rows.update(self._stage, description=text, visible=bool(text))

    def refresh(self) -> None:
        self._rows.refresh()

    @contextmanager
    def task(self, what: str, total: int, unit: str) -> Iterator[Advance]:
        row = self._rows.add_task(what, total=total, unit=unit)
        try:
            yield lambda count: self._rows.advance(row, count)
        finally:
            self._rows.remove_task(row)


class _Rows(Progress):
    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table([t for t in self.tasks if t.total is None])
        yield self.make_tasks_table(
            [t for t in self.tasks if t.total is not None and (t.elapsed or 0) > SHOWN_AFTER]
        )


class _Bar(BarColumn):
    def render(self, task: Task) -> RenderableType:  # type: ignore[override]
        return super().render(task) if task.total else ""


class _Share(ProgressColumn):
    """Share, counts and time left: " 41 %  5/12 layers  0:07 left"."""

    def render(self, task: Task) -> Text:
        if not task.total:
            return Text()
        done, total, unit = task.completed, task.total, task.fields["unit"]
        text = f"{100 * done / total:3.0f} %  "
        if unit == "bytes":
            text += f"{decimal(int(done))} of {decimal(int(total))}"
        else:
            text += f"{done:,.0f} of {total:,.0f} {unit}"
        if task.time_remaining is not None:
            minutes, seconds = divmod(int(task.time_remaining), 60)
            text += f"  {minutes}:{seconds:02} left"
        return Text(text)

"""The terminal, as all commands that print more than plain lines use it.

Owns that text is shown as it is: no control character of a response, a metric or a file name
reaches the terminal, and brackets in it are not taken for rich's markup.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rolepool.command_line import silence_stdout
from rolepool.errors import printable


class Terminal(Console):
    """A console of rich that prints text as it is. If the output pipe closes (`| head`), it goes
    silent."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        silence_stdout()

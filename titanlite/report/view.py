"""Show the status of a run in a terminal and update it in place."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import ConsoleRenderable, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType

ERASE_LINE = (ControlType.ERASE_IN_LINE, 2)


class View(Live):
    """A `rich.live.Live` display that also erases lines wrapped by the terminal.

    When the window becomes narrower, the terminal wraps the lines on the screen. The display then
    takes up more lines than `Live` drew, and `Live` alone would erase too few.
    """

    _text: RenderableType = ""
    _drawn_widths: tuple[int, ...] = ()

    def get_renderable(self) -> RenderableType:
        """Return the content of the display, followed by an empty line for the cursor.

        The terminal echoes Ctrl-C as "^C" at the cursor. At the end of a full line, the echo would
        wrap onto another line, which would not be erased.
        """
        self._text = super().get_renderable()
        return Group(self._text, "")

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Add control codes that erase the lines wrapped by the terminal.

        `Live` calls this before it draws the display.
        """
        width, height = self.console.size
        # A line of n cells wraps onto (n - 1) // width additional lines.
        num_wrapped = sum(max(0, drawn - 1) // width for drawn in self._drawn_widths)
        line_above = ((ControlType.CURSOR_UP, 1), ERASE_LINE)
        erase = Control(ControlType.CARRIAGE_RETURN, ERASE_LINE, *(line_above * num_wrapped))

        lines = f"{self._text}\n".split("\n")[:height]
        self._drawn_widths = tuple(min(cell_len(line), width) for line in lines)
        return [erase, *super().process_renderables(renderables)]

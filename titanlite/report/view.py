"""The view of a run on a terminal that can move its cursor.

Invariant: it erases all that it has drawn, also where a window that became narrower has broken its lines.
"""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import ConsoleRenderable, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType


class View(Live):
    """rich's Live, which goes up by as many lines as it has drawn. Terminals break lines that are longer than a
    narrower window, so there can be more."""

    _text, _drawn = "", tuple[int, ...]()  # what is to be drawn; the width of each line that is on the terminal

    def get_renderable(self) -> RenderableType:
        """Called by rich for what is to be drawn."""
        self._text = super().get_renderable()
        return self._text

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Called by rich for what is to be written, with the view below it."""
        width, height = self.console.size
        more = sum(max(0, cells - 1) // width for cells in self._drawn)
        up = (ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)
        erase = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up * more)
        self._drawn = tuple(min(cell_len(line), width) for line in str(self._text).split("\n")[:height])
        return [erase, *super().process_renderables(renderables)]

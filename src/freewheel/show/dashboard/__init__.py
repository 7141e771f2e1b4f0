"""`freewheel dashboard`: a page that shows runs while they go on, and after. It only reads records."""

from __future__ import annotations

from freewheel.show.dashboard.board import Board
from freewheel.show.dashboard.server import Dashboard

__all__ = ["Board", "Dashboard"]

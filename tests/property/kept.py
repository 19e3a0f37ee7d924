"""Calls that once were wrong, kept as they were drawn."""

from __future__ import annotations

from property.drawn import Drawn

KEPT: tuple[Drawn, ...] = ()

"""Rewrites from a problem to a tile graph, and what they derive from the spec on the way."""

"""`python -m flashgen`: the same as the `flashgen` command."""

from __future__ import annotations

from flashgen.cli.entry import main

main()

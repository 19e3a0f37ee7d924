"""Families of kernels: which there are, and why one cannot be had here.

Read by the warm path, so it imports nothing heavy.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from flashgen.schedule.model import HOPPER, Family
from flashgen.target import Target

FAMILIES: tuple[Family, ...] = get_args(Family)
PORTABLE: Family = "triton"
MIN_GLUON = (3, 6)  # of Triton: Gluon as the templates use it


def families_here(target: Target) -> tuple[Family, ...]:
    """Families whose kernels run on the target and compile with the Triton here."""
    return tuple(family for family in FAMILIES if not missing_here(family, target))


def missing_here(family: Family, target: Target) -> str | None:
    """Why no kernel of a family can be had for the target, or with the Triton here."""
    if family == HOPPER and target.arch != "sm_90":
        return f"kernels of family {family} run on sm_90, {target.id} is {target.arch}"
    return gluon_missing() if family == HOPPER else None


@cache
def gluon_missing() -> str | None:
    """Why the Triton here compiles no Gluon; None: it does. Imports nothing."""
    version = _triton_version()
    digits = version.split(".")[:2]
    if len(digits) < 2 or not all(part.isdecimal() for part in digits):
        return None  # whoever builds Triton from source knows what is in it
    if tuple(map(int, digits)) < MIN_GLUON:
        least = ".".join(map(str, MIN_GLUON))
        return f"triton {version} has no Gluon for Hopper, {least} or newer is needed"
    found = find_spec("triton")
    places = list(found.submodule_search_locations or ()) if found else []
    if not any(
        (Path(place) / "experimental" / "gluon" / "__init__.py").is_file() for place in places
    ):
        return f"triton {version} here has no triton.experimental.gluon"
    return None


def _triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""

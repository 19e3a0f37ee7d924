"""What is installed: versions, dependencies, and the data that a wheel must carry."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

import flashgen
from flashgen import settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))
CONSTRAINTS = (CHECKOUT / "constraints.txt").read_text("utf-8")

# Distribution -> the name that it is imported by, where they differ.
IMPORTED = {"pyyaml": "yaml"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = re.findall(r"^([a-z0-9-]+)==([^;\s]+)", CONSTRAINTS, re.MULTILINE)
    return dict(lines)


def names(requirements: list[str]) -> set[str]:
    found = (re.match(r"[A-Za-z0-9._-]+", text) for text in requirements)
    return {normal(match[0]) for match in found if match}


def test_one_version() -> None:
    assert PROJECT["project"]["version"] == flashgen.__version__


def test_everything_that_is_needed_is_pinned() -> None:
    """Dependencies, and theirs as far as they are installed here: an install has no others."""
    extras = PROJECT["project"]["optional-dependencies"]
    optional = [need for name in ("test", "plot", "storage") for need in extras[name]]
    wanted = names([*PROJECT["project"]["dependencies"], *optional])
    found: set[str] = set()
    while wanted - found:
        name = min(wanted - found)
        found.add(name)
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            if not name.startswith("nvidia-"):  # parts of CUDA, pinned by torch itself
                assert name in {*pins(), *ELSEWHERE}, name
            continue
        wanted |= names([need for need in needs if "extra ==" not in need])
    assert found - ELSEWHERE <= set(pins())


# Needed on other systems or versions of Python only, or (setuptools) not by version.
ELSEWHERE = {"colorama", "exceptiongroup", "importlib-metadata", "setuptools", "tomli", "tzdata"}


def test_torch_and_triton_are_pinned_as_a_pair() -> None:
    assert (pins()["torch"], pins()["triton"]) == ("2.13.0", "3.7.1")
    assert "numpy >= 2.4" in CONSTRAINTS


@pytest.mark.parametrize("package", ["typing-extensions", "jinja2", "sympy"])
def test_pins_satisfy_the_floors(package: str) -> None:
    assert re.fullmatch(r"[0-9][0-9.]*", pins()[package])


def test_third_party_imports_are_declared() -> None:
    """What the package imports at any level is a dependency; what is not imported is none."""
    imported = set()
    for path in (CHECKOUT / "flashgen").rglob("*.py"):
        text = path.read_text("utf-8")
        imported |= set(re.findall(r"^\s*(?:import|from) ([a-z_0-9]+)", text, re.MULTILINE))
    declared = {IMPORTED.get(n, n) for n in names(PROJECT["project"]["dependencies"])}
    third_party = imported - set(sys.stdlib_module_names) - {"flashgen", "__future__"}
    assert declared <= third_party | {"rich"}
    assert third_party - declared <= OPTIONAL


# Imported where something optional is asked for, with a remedy where it is not there.
OPTIONAL = {"matplotlib", "plotly"}


def test_the_wheel_carries_the_data_that_settings_look_for() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    folders = (settings.templates_dir, settings.specs_dir, settings.tuned_configs_dir)
    assert {folder().name: f"flashgen/data/{folder().name}" for folder in folders} == included
    for name in included:
        assert any((CHECKOUT / name).iterdir()), f"{name} is empty, and git keeps no empty folder"


def test_an_installed_package_takes_its_own_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_PACKAGE", tmp_path / "flashgen")
    (tmp_path / "flashgen" / "data" / "specs").mkdir(parents=True)
    settings._shipped.cache_clear()
    try:
        assert settings.specs_dir() == tmp_path / "flashgen" / "data" / "specs"
        assert settings.templates_dir() == tmp_path / "templates"
    finally:
        settings._shipped.cache_clear()


def test_the_licence_is_whole() -> None:
    text = (CHECKOUT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_installed_metadata_is_of_this_project() -> None:
    try:
        version = metadata.version("flashgen")
    except metadata.PackageNotFoundError:
        return  # run from a checkout that is not installed
    assert version == flashgen.__version__

"""The documentation says what the code does: its examples run, its tables are whole."""

from __future__ import annotations

import doctest
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import typer

from flashgen import errors, parse_spec, settings
from flashgen.cli.main import app
from flashgen.compiler.choose import check_served
from flashgen.runtime.interpret import check_interpreter
from flashgen.schedule.model import Schedule, all_buckets
from flashgen.spec.parts import EXTENTS, FUNCTIONS, SYMBOLS
from flashgen.spec.read import FIELDS

CHECKOUT = Path(__file__).resolve().parents[2]
README = (CHECKOUT / "README.md").read_text("utf-8")
SPEC = (CHECKOUT / "docs" / "spec.md").read_text("utf-8")
CLI = (CHECKOUT / "docs" / "cli.md").read_text("utf-8")


def block(text: str, kind: str) -> str:
    """The first fenced block of this kind."""
    found = re.search(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"no {kind} block"
    return found[1]


@pytest.mark.parametrize(("marker", "last"), [("main", "report.md"), ("test", "pytest")])
def test_the_quick_start_is_one_line_that_sets_itself_up(marker: str, last: str) -> None:
    line = block(README.partition(f"<!-- {marker} command -->\n")[2], "bash")
    assert line.count("\n") == 1
    assert line.startswith("python3 -m venv .venv && .venv/bin/pip install -c constraints.txt ")
    assert last in line.split("&&")[-1]


def test_ci_runs_the_readme_s_commands() -> None:
    script = (CHECKOUT / ".ci" / "run").read_text("utf-8")
    for marker in ("main command", "test command"):
        assert f"readme_command '{marker}'" in script
        assert f"<!-- {marker} -->\n```bash\n" in README


def test_the_spec_of_the_readme_is_valid_and_served() -> None:
    spec = parse_spec(block(README, "yaml"))
    check_served(spec)
    assert spec.warnings() == ()


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
def test_the_python_example_of_the_readme_runs() -> None:
    check_interpreter()
    names: dict[str, object] = {}
    exec(compile(block(README, "python"), "README.md", "exec"), names)
    assert str(getattr(names["out"], "shape", "")) == "torch.Size([1, 4, 100, 64])"
    assert str(getattr(names["lse"], "shape", "")) == "torch.Size([1, 4, 100])"


def test_the_architecture_follows_a_real_spec() -> None:
    path = CHECKOUT / "docs" / "architecture.md"
    result = doctest.testfile(
        str(path), module_relative=False, optionflags=doctest.ELLIPSIS | doctest.REPORT_NDIFF
    )
    assert result.attempted > 20
    assert result.failed == 0


@pytest.mark.filterwarnings("ignore::flashgen.errors.FlashgenWarning")
def test_schedules_are_described_and_their_examples_run() -> None:
    check_interpreter()
    path = CHECKOUT / "docs" / "schedules.md"
    result = doctest.testfile(str(path), module_relative=False, optionflags=doctest.REPORT_NDIFF)
    assert result.attempted > 8
    assert result.failed == 0
    for field in fields(Schedule):
        default = "required" if field.default is MISSING else f"`{field.default}`"
        row = re.search(rf"^\| `{field.name}` \|.*\| (.*) \|$", path.read_text("utf-8"), re.M)
        assert row is not None, field.name
        assert row[1].strip("`") == default.strip("`"), field.name


def test_every_field_symbol_and_function_of_the_language_is_described() -> None:
    for field in FIELDS:
        assert f"\n| `{field}` |" in SPEC, field
    for name in (*SYMBOLS, *EXTENTS, *FUNCTIONS):
        assert re.search(rf"(`|\b){name}\b", SPEC), name


def test_every_exit_code_is_described() -> None:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.FlashgenError):
            assert f"| {kind.exit_code} | `{kind.__name__}` |" in CLI
            assert f"{kind.exit_code} " in README


def test_every_command_and_option_is_described() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        section = CLI.partition(f"### `flashgen {name}")[2].partition("\n### ")[0]
        assert section, name
        for option in (o for p in command.params for o in p.opts if o.startswith("--")):
            if option not in ("--help", "--json"):
                assert option in section or option.replace("--", "--no-") in section, (name, option)


def test_the_templates_are_listed() -> None:
    listed = (settings.templates_dir() / "README.md").read_text("utf-8")
    for path in settings.templates_dir().rglob("*.jinja"):
        assert f"| `{path.relative_to(settings.templates_dir())}` |" in listed


def test_every_link_leads_somewhere() -> None:
    for page in [CHECKOUT / "README.md", *(CHECKOUT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8")):
            assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"


def test_buckets_are_finite() -> None:
    """What the README calls 'every length' rests on a last bucket without limits."""
    assert all_buckets()[-1].to_dict() == {"q_len_max": None, "kv_len_max": None}
    assert sys.version_info >= (3, 10)

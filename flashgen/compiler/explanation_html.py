"""An explanation as one HTML file: the text's tables, and the pictures inside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from flashgen.compiler.explanation import Explanation, shape_text
from flashgen.compiler.explanation_text import (
    ALGORITHM_ROWS,
    explanation_text,
    of_limit,
    rejection_rows,
)
from flashgen.compiler.pictures import embedded
from flashgen.errors import FlashgenError

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b2733; margin: 2.5rem auto; max-width: 72rem;
  padding: 0 1.5rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; font-size: 1.15rem; }
.sub { color: #6b7785; margin-top: .2rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(30rem, 1fr)); gap: 1rem; }
img { width: 100%; border: 1px solid #d9dee4; border-radius: 6px; }
table { border-collapse: collapse; } th, td { padding: .25rem .9rem .25rem 0; text-align: left;
  border-bottom: 1px solid #e8ebef; vertical-align: top; } th { color: #6b7785; font-weight: 600; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: #f5f7f9; padding: 1rem; overflow-x: auto; border-radius: 6px; }
dt { margin-top: .7rem; font-weight: 600; } dd { margin: 0 0 0 1.5rem; }
"""


def write_html(found: Explanation, path: Path) -> None:
    """The page, whole in one file; FlashgenError if it cannot be written."""
    page = "\n".join(_page(found)) + "\n"
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise FlashgenError(f"{path}: cannot be written ({error.strerror})") from None


def _page(found: Explanation) -> Iterator[str]:
    name = escape(found.spec.display_name)
    target = found.target
    yield '<!doctype html><html lang="en"><meta charset="utf-8">'
    yield f"<title>{name} on {escape(target.id)}</title><style>{STYLE}</style>"
    yield f"<h1>{name}</h1>"
    yield (
        f'<p class="sub">{escape(target.name)} ({target.arch}), {escape(shape_text(found.shape))}, '
        f"{escape(found.spec.dtype.q)}; {escape(str(found.schedule or 'no schedule fits'))}</p>"
    )
    yield from (f"<p><b>Not served:</b> {escape(each)}</p>" for each in found.not_served)
    yield from _choice(found)
    if found.spec.description:
        yield f"<p>{escape(found.spec.description)}</p>"
    yield "<h2>What limits the kernel</h2><ul>"
    yield from (f"<li>{escape(limit)}</li>" for limit in found.limits)
    yield "</ul><h2>Pictures</h2><div class=pictures>"
    for title, url in embedded(found).items():
        yield f'<img alt="{escape(title)}" src="{url}">'
    yield "</div><h2>Loop orders side by side</h2>"
    head = ("", *(each.name for each in found.algorithms))
    rows = ((label, *(of(each) for each in found.algorithms)) for label, of in ALGORITHM_ROWS)
    yield from _table(head, rows)
    yield "<h2>Formulas</h2><dl>"
    for formula in found.formulas:
        yield f"<dt>{formula.name} = {formula.value:,} {formula.unit}</dt>"
        yield f"<dd><code>{escape(formula.text)}</code></dd>"
        yield f"<dd><code>{escape(formula.with_numbers)}</code></dd>"
    yield "</dl><h2>Families of kernels</h2><ul>"
    yield from (f"<li>{each.family}: {escape(str(each))}</li>" for each in found.families)
    yield "</ul><h2>Rejected tile shapes</h2>"
    for group in found.rejections:
        yield f"<h3>{escape(group.reason)}</h3>"
        first, *others = rejection_rows(group)
        yield from _table(first, others)
    yield "<h2>Largest tiles that fit</h2><ul>"
    cells = {(cell.block_m, cell.block_n): cell for cell in found.grid}
    for schedule in found.frontier:
        cell = cells[schedule.block_m, schedule.block_n]
        used = of_limit(cell.smem_bytes, target.smem_per_block_bytes)
        yield f"<li>{escape(str(schedule))}: {used}</li>"
    yield f"</ul><h2>As on the terminal</h2><pre>{escape(explanation_text(found))}</pre></html>"


def _choice(found: Explanation) -> Iterator[str]:
    """Who chose the schedule, and the untuned one where that is another."""
    choice = found.choice
    if choice is None:
        return
    yield f'<p class="sub">Schedule chosen: {escape(str(choice))}'
    if choice.untuned != found.schedule:
        yield f"<br>Untuned: {escape(str(choice.untuned))}"
    yield "</p>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</table>"

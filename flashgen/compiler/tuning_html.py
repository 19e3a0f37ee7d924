"""A page on a tuning run: Optuna's own pictures, and predicted against measured times."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.errors import FlashgenError, install_hint
from flashgen.runtime.artifact import replace_file

if TYPE_CHECKING:
    from flashgen.compiler.tuning import Tuning
    from flashgen.tune.session import Result

FEWEST_TRIALS = 4  # what importances can be computed from


def need_plotly() -> None:
    """FlashgenError that says what to install, where there is nothing to draw with."""
    if find_spec("plotly") is None:
        raise FlashgenError(
            f"--html needs plotly, which is not installed\n  hint: {install_hint('plot')}"
        )


def write_html(tuning: Tuning, path: Path) -> None:
    """One file with everything inside; FlashgenError where it cannot be written."""
    need_plotly()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, "\n".join(_page(tuning)), shared=True)
    except OSError as error:
        raise FlashgenError(f"{path}: cannot be written ({error.strerror})") from error


def _page(tuning: Tuning) -> Iterator[str]:
    title = f"{tuning.spec.display_name} on {tuning.target.name}: tuning"
    yield '<!doctype html><html lang="en"><meta charset="utf-8">'
    yield f"<title>{escape(title)}</title>"
    yield "<style>body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em}</style>"
    yield f"<h1>{escape(title)}</h1>"
    script = True  # plotly itself, once a page
    for result in tuning.results:
        yield f"<h2>{escape(str(result.case.bucket))}</h2>"
        yield f"<p>{escape(_sentence(result))}</p>"
        for heading, figure in _figures(result):
            yield f"<h3>{escape(heading)}</h3>"
            yield figure.to_html(full_html=False, include_plotlyjs=script)
            script = False
        yield from _failures(result)
    yield "</html>"


def _sentence(result: Result) -> str:
    entry = result.entry
    if entry is None:
        return f"Nothing was timed: {result.outcome.stopped if result.outcome else ''}."
    gain = f", {entry.speedup:.3f} times as fast as the untuned" if entry.speedup else ""
    return (
        f"{entry.schedule}: {entry.time_us:.4g} us ({entry.low_us:.4g} to {entry.high_us:.4g})"
        f"{gain}; {entry.rate:.4g} {entry.unit}, {100 * entry.bound_us / entry.time_us:.0f}% of "
        f"the roofline; {entry.trials} trials of {entry.feasible} feasible schedules."
    )


def _figures(result: Result) -> Iterator[tuple[str, Any]]:
    """Optuna's pictures of the study, where it has enough trials, then the model's."""
    found = result.outcome
    if found is None or result.trials is None:
        return
    measured = [each for each in found.known.values() if each.measured]
    if len(measured) >= FEWEST_TRIALS:
        yield from _of_optuna(result.trials.study)
    if result.predicted_us and measured:
        yield "Predicted against measured", _predicted(result)


def _of_optuna(study: Any) -> Iterator[tuple[str, Any]]:
    from optuna import importance, visualization

    def microseconds(trial: Any) -> float:
        return float(trial.value)

    label = {"target": microseconds, "target_name": "us"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield "History", visualization.plot_optimization_history(study, **label)
        yield (
            "Importances",
            visualization.plot_param_importances(
                study, evaluator=importance.PedAnovaImportanceEvaluator()
            ),
        )
        yield "Slices", visualization.plot_slice(study, params=_varied(study), **label)


def _varied(study: Any) -> list[str]:
    """Parameters that take more than one value."""
    values: dict[str, set[object]] = {}
    for trial in study.get_trials(deepcopy=False):
        for name, value in trial.params.items():
            values.setdefault(name, set()).add(value)
    return [name for name, found in values.items() if len(found) > 1] or list(values)[:1]


def _predicted(result: Result) -> Any:
    import plotly.graph_objects as go

    assert result.outcome is not None
    known = result.outcome.known
    shown = [s for s, m in known.items() if m.measured and s in result.predicted_us]
    predicted = [result.predicted_us[s] for s in shown]
    times = [known[s].time_us for s in shown]
    ends = [min(predicted, default=1.0), max(predicted, default=1.0)]
    figure = go.Figure(
        [
            go.Scatter(
                x=predicted, y=times, mode="markers", text=[str(s) for s in shown], name="schedules"
            ),
            go.Scatter(x=ends, y=ends, mode="lines", name="equal", line={"dash": "dot"}),
        ]
    )
    figure.update_layout(xaxis_title="predicted, us", yaxis_title="measured, us")
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def _failures(result: Result) -> Iterator[str]:
    found = result.outcome
    failed = [m for m in found.known.values() if not m.measured] if found else []
    discarded = dict(found.discarded) if found else {}
    if not failed and not discarded:
        return
    yield "<h3>Not usable</h3><table><tr><th>schedule</th><th></th><th>reason</th></tr>"
    rows: list[tuple[str, str, str]] = [(str(m.schedule), m.state, m.reason) for m in failed]
    rows += [(str(s), "not compiled", reason) for s, reason in discarded.items()]
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</table>"

"""The first run of Hopper kernels: which checks come first, and what a lack of time leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.bench import gluon_first
from flashgen.bench.gluon_first import check_jobs, main
from flashgen.bench.gluon_variants import VARIANTS


def test_every_variant_is_checked_before_any_has_a_second_schedule() -> None:
    jobs = check_jobs(VARIANTS, "cuda")
    assert len({job.name for job in jobs}) == len(jobs) == sum(len(v.schedules) for v in VARIANTS)
    assert [job.task["variant"] for job in jobs[: len(VARIANTS)]] == [v.name for v in VARIANTS]
    assert [job.task["schedule"] for job in jobs] == sorted(job.task["schedule"] for job in jobs)


def test_what_there_is_no_time_for_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gluon_first.Job, "start", lambda job: pytest.fail("began"))
    words = ["gluon_first", "--out", str(tmp_path), "--seconds", "0", "--only", "padded"]
    monkeypatch.setattr("sys.argv", words)
    main()
    said = capsys.readouterr().out
    assert said.startswith("not begun, for lack of time: padded-d80 [")
    assert said.count("padded-") == 4

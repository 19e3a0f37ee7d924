"""The page of tuned configs: what it says, and that the committed one is of these tables."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from entries import FAST, OTHER, entry, table

from flashgen import settings
from flashgen.bench.tuned_report import main, markdown, tables_of
from flashgen.schedule.model import Bucket

PAGES = Path(__file__).parents[2] / "benchmarks"


def test_the_page_has_every_entry_and_the_mean() -> None:
    same = entry(OTHER, Bucket(16, 2048), default_us=12.0, time_us=12.0)
    failed = entry(FAST, Bucket(None, None), default_us=None)
    page = markdown(
        "nvidia-h200", [table(entry(FAST, default_us=48.0, time_us=12.0), same, failed)]
    )
    assert "3 entries of 1 specs; tuned over untuned: 2.000 (geometric mean)" in page
    assert "lowest 1.000, highest 4.000; 1 entries are the untuned schedule" in page
    assert "| untuned failed |" in page
    assert page.count("| tuned |") == 3


def test_versions_are_named_once() -> None:
    newer = replace(entry().toolchain, triton="3.7.1")
    page = markdown("nvidia-h200", [table(entry(), entry(bucket=Bucket(16, 16), toolchain=newer))])
    assert page.count("triton 3.6.0") == page.count("triton 3.7.1") == 1


@pytest.mark.parametrize(
    "gpu", sorted(p.name for p in settings.tuned_configs_dir().iterdir() if p.is_dir())
)
def test_the_committed_page_is_of_the_committed_tables(gpu: str) -> None:
    assert (PAGES / gpu / "tuned.md").read_text("utf-8") == markdown(gpu, tables_of(gpu))


def test_the_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o027)
    try:
        assert main([]) == 0
    finally:
        os.umask(before)
    path = tmp_path / "benchmarks/nvidia-h200/tuned.md"
    assert path.read_text("utf-8") == markdown("nvidia-h200", tables_of("nvidia-h200"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


REFUSED = {
    "/nope": "target: unknown GPU '/nope'",
    "nvidia-h20": "did you mean 'nvidia-h200'?",
    "nvidia-a100-80gb": "nvidia-a100-80gb: no tables in ",
}


@pytest.mark.parametrize("gpu", REFUSED)
def test_a_gpu_without_tables_is_refused_and_nothing_made(
    gpu: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([gpu]) == 1
    assert REFUSED[gpu] in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

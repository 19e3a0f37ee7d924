"""Nsight Compute's command line and output, without Nsight Compute."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from flashgen.bench import ncu

NVTX = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
PRINTED = f'''\
==PROF== Connected to process 41 (/usr/bin/python3.12)
==PROF== Profiling "attention_fwd" - 0: 0%....50%....100% - 3 passes
==PROF== Profiling "attention_merge" - 1: 0%....50%....100% - 4 passes
==PROF== Disconnected from process 41
"ID","Process ID","Process Name","Host Name","{NVTX}","Kernel Name","Context","Stream",\
"Block Size","Grid Size","Device","CC","dram__bytes_read.sum","launch__registers_per_thread",\
"lts__t_sectors_srcunit_ltcfabric.sum"
"","","","","","","","","","","","","byte","register/thread","sector"
"0","41","python3.12","127.0.0.1","1  ""<default domain>:flashgen case 7:none:none:none:none:none:\
none""","attention_fwd","1","7","(128, 1, 1)","(1024, 1, 1)","0","9.0","134,217,728","168","n/a"
"1","41","python3.12","127.0.0.1","","reduce_kernel","1","7","(128, 1, 1)","(1, 1, 1)","0","9.0",\
"1024.5","32","5"
"2","41","python3.12","127.0.0.1","1  ""<default domain>:flashgen after 7:none:none:none:none:none\
:none""","reduce_kernel","1","7","(128, 1, 1)","(1, 1, 1)","0","9.0","268435456","32","5"
'''


def test_what_it_prints_is_read() -> None:
    found = ncu.parse(PRINTED)
    assert found.passes == 4
    assert len(found.messages) == 4
    first, second, third = found.kernels
    assert first.name == "attention_fwd"
    assert first.grid == "(1024, 1, 1)"
    assert first.metrics == {
        "dram__bytes_read.sum": 134217728.0,
        "launch__registers_per_thread": 168.0,
    }
    assert second.label is None
    assert second.metrics["dram__bytes_read.sum"] == 1024.5
    assert found.labelled(ncu.LABEL, 7) == (first,)
    assert found.labelled(ncu.AFTER, 7) == (third,)
    assert found.labelled(ncu.LABEL, 70) == ()


@pytest.mark.parametrize("text", ["", "==ERROR== nothing\n", '"not","the","table"\n"1","2","3"\n'])
def test_other_output_has_no_kernels(text: str) -> None:
    assert ncu.parse(text).kernels == ()


def test_the_command_leaves_clocks_alone_and_says_what_becomes_of_caches() -> None:
    command = ncu.command_line("ncu", ["python", "-m", "x"], ["a", "b"], Path("log"), flush=True)
    text = " ".join(command)
    assert text == (
        "ncu --metrics a,b --clock-control none --cache-control all --profile-from-start off "
        "--target-processes application-only --nvtx --csv --page raw --print-units base "
        "--log-file log python -m x"
    )
    command = ncu.command_line("ncu", ["x"], ["a"], Path("log"), flush=False)
    assert command[command.index("--cache-control") + 1] == "none"


def script(tmp_path: Path, text: str) -> str:
    """An executable that stands for ncu."""
    path = tmp_path / "ncu"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_counters_that_the_gpu_does_not_have_are_not_asked_for(tmp_path: Path) -> None:
    tool = script(tmp_path, "echo 'Device NVIDIA H200'\necho 'dram__bytes_read   # bytes read'")
    wished = ["dram__bytes_read.sum", "lts__unknown.sum", "launch__registers_per_thread"]
    assert ncu.available(tool, wished) == (wished[0], wished[2])


@pytest.mark.parametrize("text", ["exit 3", "echo nothing that is known", "exec sleep 20"])
def test_where_it_does_not_say_all_are_asked_for(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ncu, "QUERY_LIMIT_S", 0.5)
    assert ncu.available(script(tmp_path, text), ["a.sum"]) == ("a.sum",)


def test_a_profile_is_read_from_its_log(tmp_path: Path) -> None:
    (tmp_path / "printed").write_text(PRINTED)
    tool = script(
        tmp_path,
        f'while [ "$1" != --log-file ]; do shift; done; cp {tmp_path}/printed "$2"; '
        "echo 'one case: failed' >&2",
    )
    found = ncu.profile(tool, ["x"], ["a"], tmp_path / "log", flush=True, limit_s=20)
    assert len(found.kernels) == 3
    assert found.complaints == ("one case: failed",)


def message(call: Callable[[], object]) -> str:
    with pytest.raises(ncu.CounterError) as raised:
        call()
    return str(raised.value)


def test_errors_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    golden("errors/ncu-missing.txt", message(ncu.find_ncu))
    monkeypatch.undo()
    log = tmp_path / "log"

    def run(tool: str, limit_s: float = 20.0) -> str:
        return message(lambda: ncu.profile(tool, ["x"], ["a"], log, flush=True, limit_s=limit_s))

    refused = script(
        tmp_path,
        'while [ "$1" != --log-file ]; do shift; done; '
        "echo '==ERROR== ERR_NVGPUCTRPERM - no permission to access counters' > \"$2\"; exit 1",
    )
    golden("errors/ncu-refused.txt", run(refused))
    log.unlink()
    golden("errors/ncu-late.txt", run(script(tmp_path, "exec sleep 20"), limit_s=0.5))
    golden("errors/ncu-silent.txt", run(script(tmp_path, "exit 0")))


def test_the_tool_is_the_one_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = script(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ncu.find_ncu() == tool
    assert subprocess.run([tool], check=False).returncode == 0


def test_what_is_needed_is_asked_for_once() -> None:
    assert set(ncu.NEEDED) <= set(ncu.METRICS)
    assert set(ncu.DRAM_METRICS) <= set(ncu.METRICS)
    assert len(set(ncu.METRICS)) == len(ncu.METRICS)

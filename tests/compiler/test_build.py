"""`build`: what it writes, and what it refuses."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashgen import AttentionSpec, reference
from flashgen.compiler import BuildResult, build, building
from flashgen.compiler.folder import Folder, digests, write
from flashgen.compiler.machine_code import Compilers, Job
from flashgen.compiler.verification import CaseResult, Verification
from flashgen.errors import (
    CompileError,
    FlashgenError,
    FlashgenWarning,
    NotServedError,
    ScheduleError,
    TargetError,
    VerificationError,
)
from flashgen.problem import Problem
from flashgen.runtime.artifact import replace_file
from flashgen.runtime.said import forget
from flashgen.schedule.model import Schedule
from flashgen.target import get_target
from flashgen.tune import lookup

TARGET = "nvidia-h200"


def test_folder_holds_what_the_manifest_names(built: BuildResult) -> None:
    manifest = json.loads(built.manifest.read_text())
    assert set(manifest["files"]) | {"manifest.json"} == {p.name for p in built.out.iterdir()}
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((built.out / name).read_bytes()).hexdigest() == digest
    assert {Path(name).suffix for name in manifest["files"]} == {".py", ".ptx", ".cubin", ".md"}


def test_manifest(built: BuildResult, small: AttentionSpec) -> None:
    manifest = json.loads(built.manifest.read_text())
    assert manifest == json.loads(json.dumps(built.to_dict()))
    assert manifest["schema"] == 1
    assert manifest["fingerprint"] == small.fingerprint
    assert manifest["spec"] == small.canonical()
    assert manifest["target"]["id"] == TARGET
    assert manifest["verified"] is True
    assert manifest["verification"]["ok"] is True
    assert manifest["arguments"] == ["q", "k", "v", "prefix"]
    assert manifest["returns"] == ["out", "lse"]
    assert set(manifest["versions"]) == {"flashgen", "torch", "triton", "python"}
    assert len(manifest["generator_digest"]) == 64
    assert manifest["shapes"][0]["kv_len"] == 4096
    assert manifest["shapes"][0]["dram_bytes"] > 2 * 4096 * 16 * 2


def test_kernels_report_compiler_beside_budget(built: BuildResult) -> None:
    kinds = {kernel.schedule.kernel for kernel in built.kernels}
    assert kinds == {"loop", "single_tile"}
    for kernel in built.kernels:
        assert kernel.smem_bytes == kernel.budget_smem_bytes + kernel.smem_difference_bytes
        assert 0 < kernel.smem_bytes <= get_target(TARGET).smem_per_block_bytes
        assert kernel.regs_per_thread is not None
        assert kernel.budget_regs_per_thread <= kernel.regs_per_thread <= 255
        assert kernel.spill_bytes == 0
        assert b".target sm_90a" in (built.out / kernel.files[0]).read_bytes()
        assert (built.out / kernel.files[1]).read_bytes()[:4] == b"\x7fELF"


def test_the_shapes_schedule_is_compiled_ahead(built: BuildResult) -> None:
    decode = built.to_dict()["shapes"][0]["schedule"]  # type: ignore[index]
    assert decode in {str(kernel.schedule) for kernel in built.kernels}


def test_report_is_for_reading(built: BuildResult) -> None:
    text = built.report.read_text()
    for part in (
        "# small",
        "A small causal spec.",
        "NVIDIA H200",
        "`small(q, k, v, prefix=) -> (out, lse)`",
        "Visited: key tiles with `0 ≤ k < Min(",
        "compiler − budget",
        "Everything that the spec asks for is served.",
        "verified, ",
        "`untuned`: chosen by flashgen's model of the GPU",
        "fp64 is the oracle",
        "Eager is the same in the usual way",
        "Bound of lse: the same with 8 ulps of fp32",
        "`b1 h4:1 q17 k259 plain` is one batch, four query heads on one K/V head",
        "Spilled: bytes of each thread's registers",
    ):
        assert part in text
    assert "| ok |" in text
    assert str(built).startswith("small for NVIDIA H200")


# However flashgen is installed (a path, an editable install's finder), it is not there.
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'flashgen':
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
"""

STANDALONE = """
import sys
sys.path.insert(0, {folder!r})
import torch
from small import small
assert not any(name == "flashgen" or name.startswith("flashgen.") for name in sys.modules)
try:
    import flashgen
except ImportError:
    pass
else:
    raise SystemExit("flashgen can be imported, so this shows nothing")
saved = torch.load({saved!r})
out, lse = small(saved["q"], saved["k"], saved["v"], prefix=saved["prefix"])
torch.save((out, lse), {result!r})
"""


def test_module_works_without_flashgen(
    built: BuildResult, small: AttentionSpec, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 33, 16).half() for heads in (4, 2, 2))
    prefix = torch.tensor([40, 7], dtype=torch.int32)
    saved, result = tmp_path / "saved.pt", tmp_path / "result.pt"
    torch.save({"q": q, "k": k, "v": v, "prefix": prefix}, saved)
    script = STANDALONE.format(folder=str(built.out), saved=str(saved), result=str(result))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + script],
        env={**environment, "TRITON_INTERPRET": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    out, lse = torch.load(result)
    given = {"prefix": prefix}
    exact, usual = (f(small, q, k, v, inputs=given) for f in (reference.attention, reference.eager))
    assert reference.compare(out, lse, *exact, usual[0], eager_lse=usual[1]).ok


def test_module_refuses_cpu_tensors_where_nothing_interprets(
    built: BuildResult, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    script = f"""
import sys, torch
sys.path.insert(0, {str(built.out)!r})
from small import small
q = torch.zeros(1, 2, 3, 16)
try:
    small(q, q, q, prefix=torch.zeros(1))
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + script],
        env={n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "TRITON_INTERPRET")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    golden("errors/module-cpu-tensors.txt", done.stdout)


def test_a_second_build_overwrites(
    built: BuildResult, small: AttentionSpec, tmp_path: Path
) -> None:
    shutil.copytree(built.out, tmp_path, dirs_exist_ok=True)
    (tmp_path / "small.py").write_text("edited")
    (tmp_path / "notes.txt").write_text("mine")
    result = build(small, tmp_path, target=TARGET, verify=False)
    assert result.module.read_text() == built.module.read_text()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert json.loads(result.manifest.read_text())["verified"] is False
    assert "Not verified" in result.report.read_text()
    assert {p.name for p in tmp_path.iterdir()} == {*result.files, "manifest.json", "notes.txt"}


def test_a_build_for_another_target_leaves_nothing_of_the_first(
    built: BuildResult, small: AttentionSpec, tmp_path: Path
) -> None:
    shutil.copytree(built.out, tmp_path, dirs_exist_ok=True)
    mine = {"small.other.cubin": "a file of another name", "sub/small.py": "and another folder"}
    (tmp_path / "sub").mkdir()
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
    result = build(small, tmp_path, target="amd-mi300x", verify=False)
    there = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert there == {*result.files, "manifest.json", *mine}
    assert not list(tmp_path.glob("small.loop*.cubin"))


@pytest.mark.parametrize("name", ["small.py", "report.md", "manifest.json"])
@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_files_of_somebody_else_are_not_overwritten(
    name: str, kind: str, small: AttentionSpec, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    path = tmp_path / name
    if kind == "file":
        path.write_text('{"name": "an extension", "files": {}}')
    elif kind == "link":
        path.symlink_to("nowhere")
    else:
        path.mkdir()
    with pytest.raises(FlashgenError) as found:
        build(small, tmp_path, target=TARGET)
    golden(
        f"errors/argument-out-foreign-{name}.txt", str(found.value).replace(str(tmp_path), "DIR")
    )
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_folder_has_one_build(
    built: BuildResult, small: AttentionSpec, golden: Callable[[str, str], None]
) -> None:
    before = {path.name: path.read_bytes() for path in built.out.iterdir()}
    with pytest.raises(FlashgenError) as found:
        build(small.replace(name="other"), built.out, target=TARGET)
    golden("errors/argument-out-other.txt", str(found.value).replace(str(built.out), "DIR"))
    assert {path.name: path.read_bytes() for path in built.out.iterdir()} == before


def test_an_edited_spec_replaces_its_build(
    built: BuildResult, small: AttentionSpec, tmp_path: Path
) -> None:
    shutil.copytree(built.out, tmp_path, dirs_exist_ok=True)
    result = build(small.replace(mask="causal", inputs={}), tmp_path, target=TARGET, verify=False)
    assert result.spec.fingerprint != small.fingerprint
    assert json.loads(result.manifest.read_text())["fingerprint"] == result.spec.fingerprint
    assert {p.name for p in tmp_path.iterdir()} == {*result.files, "manifest.json"}


def test_no_manifest_stands_beside_files_that_it_does_not_describe(
    built: BuildResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at before and after every change of the folder, where kill -9 may come."""
    shutil.copytree(built.out, tmp_path, dirs_exist_ok=True)
    seen = []

    def look() -> None:
        manifest = tmp_path / "manifest.json"
        seen.append(manifest.exists())
        if manifest.exists():
            files = json.loads(manifest.read_text())["files"]
            assert files == digests({name: (tmp_path / name).read_bytes() for name in files})
        Folder.opened(tmp_path).check("small", "small.py")  # it can be built again

    def looking(method: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            look()
            result = method(*arguments, **options)
            look()
            return result

        return call

    for name in ("replace", "unlink"):
        monkeypatch.setattr(Path, name, looking(getattr(Path, name)))
    kept = [name for name in built.files if not name.endswith(".cubin")]
    contents = {name: (built.out / name).read_bytes() + b"\n# edited\n" for name in kept}
    manifest = json.loads(built.manifest.read_text()) | {"files": digests(contents)}
    Folder.opened(tmp_path).write(contents, json.dumps(manifest).encode())
    assert seen[0] and seen[-1] and not all(seen)
    assert {p.name for p in tmp_path.iterdir()} == {*contents, "manifest.json"}


@pytest.mark.parametrize("there", ["", "out", "out/deep"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, CompileError])
def test_a_build_that_ends_early_leaves_nothing(
    there: str,
    error: type[BaseException],
    small: AttentionSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    before = set(tmp_path.rglob("*"))

    def ends(*_: object, **__: object) -> Verification:
        raise error

    monkeypatch.setattr(building, "verify_plan", ends)
    with pytest.raises(error):
        build(small, tmp_path / "out" / "deep", target=TARGET)
    assert set(tmp_path.rglob("*")) == before


def test_a_manifest_names_no_file_outside_its_folder(built: BuildResult, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("kept")
    inner = tmp_path / "out"
    shutil.copytree(built.out, inner)
    manifest = json.loads((inner / "manifest.json").read_text())
    manifest["files"] |= {"../outside.txt": "", str(outside): "", "..": "", "": ""}
    (inner / "manifest.json").write_text(json.dumps(manifest))
    assert Folder.opened(inner).listed == set(built.files)


def test_an_interrupted_build_can_be_built_again(built: BuildResult, tmp_path: Path) -> None:
    shutil.copytree(built.out, tmp_path, dirs_exist_ok=True)
    (tmp_path / "manifest.json").unlink()
    Folder.opened(tmp_path).check("small", "small.py")


def test_backward_is_reported_as_not_served(small: AttentionSpec, tmp_path: Path) -> None:
    spec = AttentionSpec(name="trained", head_dim=16, dtype="fp16", backward=True)
    result = build(spec, tmp_path, target=TARGET, verify=False)
    assert result.not_served == ("backward",)
    assert json.loads(result.manifest.read_text())["not_served"] == ["backward"]
    assert "no kernel family serves them yet" in result.report.read_text()
    assert "not served: backward" in str(result)


def test_nothing_is_written_for_what_is_not_served(tmp_path: Path) -> None:
    out = tmp_path / "out"
    paged = AttentionSpec(head_dim=64, dtype="bf16", kv_cache={"paged": {"page_size": 16}})
    with pytest.raises(NotServedError, match="kv_cache: paged") as found:
        build(paged, out, target=TARGET)
    assert found.value.exit_code == 4
    with pytest.raises(TargetError, match="unknown GPU"):
        build(AttentionSpec(head_dim=64, dtype="bf16"), out, target="nvidia-h900")
    with pytest.raises(ScheduleError, match="head_dim 1024"):
        build(AttentionSpec(head_dim=1024, dtype="bf16"), out, target=TARGET)
    large = Schedule(block_m=256, block_n=256, num_warps=8, num_stages=4)
    with pytest.raises(ScheduleError, match="smem_bytes: needs"):
        build(AttentionSpec(head_dim=128, dtype="bf16"), out, target=TARGET, schedule=large)
    assert not out.exists()


def test_a_folder_that_is_a_file(small: AttentionSpec, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(FlashgenError, match=r"out: cannot be written \(File exists\)"):
        build(small, tmp_path / "out", target=TARGET)


@pytest.mark.parametrize("name", ["x" * 300, "deep/" + "x" * 300, "x/" * 3000], ids=len)
def test_a_path_that_is_too_long(name: str, small: AttentionSpec, tmp_path: Path) -> None:
    with pytest.raises(FlashgenError, match=r"cannot be written \(File name too long\)"):
        build(small, tmp_path / name, target=TARGET)
    assert not list(tmp_path.iterdir())


def test_a_read_only_folder(small: AttentionSpec) -> None:
    with pytest.raises(FlashgenError, match="cannot be written") as found:
        build(small, "/proc/self/out", target=TARGET)
    assert "hint: choose a folder" in str(found.value)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for call in ("open", "fdopen"):  # no room for the file, and none for what is in it
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(FlashgenError, match="No space left on device"):
                write(tmp_path / "small.py", b"text")
        assert not list(tmp_path.iterdir())


def test_a_write_that_fails_or_is_interrupted_names_its_file_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (OSError(errno.ENOSPC, "full"), KeyboardInterrupt()):

        def replace_(*_: object, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replace_)
            with pytest.raises(type(error)) as found:
                replace_file(tmp_path / "small.py", b"text")
        assert getattr(found.value, "filename", str(tmp_path / "small.py")) == str(
            tmp_path / "small.py"
        )
        assert not list(tmp_path.iterdir())


def test_a_wrong_kernel_is_written_as_unverified_and_raises(
    built: BuildResult, small: AttentionSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert built.verification is not None
    wrong = CaseResult(built.verification.results[0].case, None, failure="RuntimeError: no")

    def verdict(*_: object, **__: object) -> Verification:
        assert built.verification is not None
        return replace(built.verification, results=(wrong,))

    monkeypatch.setattr(building, "verify_plan", verdict)
    with pytest.raises(
        VerificationError, match=r"small: WRONG in 1 of 1 cases[^$]*RuntimeError: no"
    ):
        build(small, tmp_path, target=TARGET)
    assert json.loads((tmp_path / "manifest.json").read_text())["verified"] is False
    assert "**WRONG**" in (tmp_path / "report.md").read_text()


def test_all_kernels_for_aligned_rows_and_any(tmp_path: Path) -> None:
    spec = AttentionSpec(name="one", head_dim=16, dtype="fp16")
    schedule = Schedule(block_m=16, block_n=16, num_warps=4, num_stages=1)
    result = build(
        spec,
        tmp_path,
        target=TARGET,
        schedule=schedule,
        verify=False,
        kernels="all",
        return_lse=False,
    )
    assert [kernel.rows for kernel in result.kernels] == ["any", "aligned"]
    assert (tmp_path / "one.loop_16x16_w4_s1.cubin").is_file()
    assert (tmp_path / "one.loop_16x16_w4_s1_any_rows.ptx").is_file()
    assert result.to_dict()["returns"] == ["out"]
    assert result.plan.origin == "given"


def test_an_amd_target(tmp_path: Path) -> None:
    spec = AttentionSpec(name="amd", head_dim=16, dtype="fp16")
    result = build(spec, tmp_path, target="amd-mi300x", verify=False)
    suffixes = {Path(name).suffix for kernel in result.kernels for name in kernel.files}
    assert suffixes == {".amdgcn", ".hsaco"}
    assert all(kernel.smem_bytes <= 65536 for kernel in result.kernels)


@pytest.mark.parametrize("name", ["torch", "json"])
def test_a_module_hides_no_other(name: str, tmp_path: Path) -> None:
    spec = AttentionSpec(name=name, head_dim=16, dtype="fp16")
    schedule = Schedule(block_m=16, block_n=16, num_warps=4, num_stages=1)
    result = build(spec, tmp_path, target=TARGET, schedule=schedule, verify=False)
    assert result.module.name == f"attention_{name}.py"


def test_triton_cache_that_cannot_be_written(
    small: AttentionSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    forget()
    schedule = Schedule(block_m=16, block_n=16, num_warps=4, num_stages=1)
    with pytest.warns(FlashgenWarning, match="Triton's kernel cache cannot be written"):
        result = build(small, tmp_path / "out", target=TARGET, schedule=schedule, verify=False)
    assert result.kernels


def test_damaged_machine_code_is_not_shipped(
    small: AttentionSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    forget()
    kinds = {"target": TARGET, "verify": False}
    sound = build(small, tmp_path / "sound", **kinds)  # type: ignore[arg-type]
    damaged = list((tmp_path / "triton").rglob("*.cubin"))
    assert len(damaged) == len(sound.kernels) > 1
    for path in damaged:
        os.truncate(path, 1000)
    with pytest.warns(FlashgenWarning, match="is damaged or incomplete") as said:
        result = build(small, tmp_path / "out", **kinds)  # type: ignore[arg-type]
    assert len(said) == 1
    assert {**result.files, "report.md": ""} == {**sound.files, "report.md": ""}


def test_the_helper_has_tritons_key_before_there_is_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers inherit the key; each would hash the library, all at the same time."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    with Compilers() as compilers:
        compilers._child.channel.close()  # no order comes
        assert compilers._child._process.wait(timeout=300) == 0
    found = json.loads((tmp_path / "triton-key.json").read_text())
    assert len(found["key"]) > 20


def test_a_helper_that_dies_says_why(built: BuildResult, tmp_path: Path) -> None:
    with Compilers() as compilers:
        job = Job(built.plan.choices[0][1], aligned=True)
        problem = Problem(built.spec, built.target)
        compilers.submit(problem, built.plan, tmp_path / "missing.py", (job,))
        with pytest.raises(CompileError, match=r"ended early[^$]*missing.py"):
            list(compilers.results())


def test_a_kernel_that_does_not_compile(built: BuildResult, tmp_path: Path) -> None:
    path = tmp_path / "broken" / "kernel.py"
    path.parent.mkdir()
    path.write_text(built.plan.text.replace("tl.dot(", "tl.no_such_thing("))
    with Compilers() as compilers:
        job = Job(built.plan.choices[0][1], aligned=True)
        compilers.submit(Problem(built.spec, built.target), built.plan, path, (job,))
        with pytest.raises(CompileError, match=r"no_such_thing[^$]*hint: the source is"):
            list(compilers.results())


# **** schedules from a table ****


@pytest.fixture
def table_of_small(small: AttentionSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry, for few queries and up to 8192 keys, with the figures of llama3_8b's."""
    committed = Path(__file__).parents[2] / "tuned_configs" / TARGET / "llama3_8b.json"
    table = json.loads(committed.read_text("utf-8"))
    entry = next(
        e for e in table["entries"] if e["bucket"] == {"q_len_max": 16, "kv_len_max": 8192}
    )
    entry["schedule"] |= {"block_m": 16, "block_n": 32, "num_warps": 2, "num_stages": 2}
    entry["measured"] |= {"time_us": 100.0, "low_us": 99.0, "high_us": 101.0}
    entry["default"]["time_us"] = 150.0
    entry["bound_us"] = 50.0
    table |= {"spec": "small", "fingerprint": small.fingerprint, "entries": [entry]}
    (tmp_path / "tables" / TARGET).mkdir(parents=True)
    (tmp_path / "tables" / TARGET / "small.json").write_text(json.dumps(table), "utf-8")
    monkeypatch.setenv("FLASHGEN_CONFIG_DIR", str(tmp_path / "tables"))
    lookup.forget()


@pytest.mark.usefixtures("table_of_small")
def test_a_tables_figures_are_in_manifest_report_and_header(
    small: AttentionSpec, tmp_path: Path
) -> None:
    result = build(small, tmp_path / "out", target=TARGET, verify=False)
    schedules = json.loads(result.manifest.read_text("utf-8"))["schedules"]
    by_keys = {s["bucket"]["kv_len_max"]: s for s in schedules if s["bucket"]["q_len_max"] == 16}
    assert by_keys[8192]["chosen_by"] == "tuned"
    assert by_keys[4096]["chosen_by"] == "tuned for q_len <= 16, kv_len <= 8192"
    found = by_keys[8192]["measured"]
    assert found == by_keys[4096]["measured"]
    assert (found["time_us"], found["untuned"]["time_us"], found["speedup"]) == (100, 150, 1.5)
    assert (found["bound_us"], found["search"]["trials"] > 0) == (50, True)
    assert found["measured_with"]["torch"] == "2.11.0"
    assert found["measured_with"]["triton"] == "3.6.0"
    assert (by_keys[64]["chosen_by"], by_keys[64]["measured"]) == ("untuned", None)
    report = result.report.read_text("utf-8")
    assert "| 100 | 150 (1.500 x) | 50 |" in report
    assert "torch 2.11.0, triton 3.6.0 |" in report
    lines = result.module.read_text("utf-8").splitlines()
    (line,) = (line for line in lines if "16x32 2 warps 2 stages" in line and " B of " in line)
    assert line.endswith("; tuned (near), tuned")
    assert any(line.endswith("; untuned") for line in lines)


def test_without_a_table_nothing_is_said_to_be_measured(built: BuildResult) -> None:
    schedules = json.loads(built.manifest.read_text("utf-8"))["schedules"]
    assert {(s["chosen_by"], s["measured"]) for s in schedules} == {("untuned", None)}
    report = built.report.read_text("utf-8")
    assert "- schedules chosen by: untuned" in report
    assert "roofline bound" not in report

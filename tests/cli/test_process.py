"""The command in a process of its own: imports, time, signals, pipes, a real build."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import MINIMAL, environment, run_process

HEAVY = ("torch", "triton", "optuna", "pydantic")  # the last came with typer 0.29
QUICK = [
    (),
    ("list",),
    ("list", "--targets", "--json"),
    ("show", "gemma2_local"),
    ("show", "gemma2_local", "--graph"),
    ("show", "modernbert_local", "--bounds"),
    ("show", "llama3_8b", "--spec"),
    ("schema",),
    ("doctor", "--json"),
]
NEED_NO_SYMPY = {"list", "schema", "doctor"}

# Runs a command, then says what it imported.
PROGRAM = """
import sys
from flashgen.cli.entry import main
sys.argv = ["flashgen", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    code = end.code
known = ("torch", "triton", "optuna", "pydantic", "sympy")
loaded = [name for name in known if name in sys.modules]
print(code or 0, *loaded, file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_answers_without_torch(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    code, *loaded = done.stderr.splitlines()[-1].split()
    assert not set(loaded) & set(HEAVY)
    assert "sympy" not in loaded or arguments[0] not in NEED_NO_SYMPY
    assert code == ("0" if arguments else "2")  # no command: the help, as wrong usage


def test_an_interrupt_that_became_another_error_ends_with_130() -> None:
    """As where Ctrl-C meets an import in C, which reports it as an ImportError."""
    program = (
        "import signal, flashgen.cli.main as main\n"
        "from flashgen.cli.entry import main as run\n"
        "from flashgen.cli.interrupt import interruptible\n"
        "def app(prog_name):\n"
        "    with interruptible():\n"
        "        try:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "        except KeyboardInterrupt:\n"
        "            raise SystemExit(1)\n"
        "main.app = app\n"
        "run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, env=environment(), capture_output=True
    )
    assert done.returncode == 130


def test_interrupt_ends_with_130(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flashgen", "build", "llama3_8b", "-o", str(tmp_path / "out")]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().endswith("...\n")  # it is at work
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)  # to a shell, both are 130
    assert out == ""
    assert "Traceback" not in err
    assert err.endswith("interrupted\n")


def test_build_and_its_manifest(tmp_path: Path) -> None:
    spec, out = tmp_path / "tiny.yaml", tmp_path / "out"
    spec.write_text(MINIMAL + "mask: causal\n", "utf-8")
    start = time.monotonic()
    done = run_process("build", str(spec), "-o", str(out), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.pop("out") == str(out)
    assert told == json.loads((out / "manifest.json").read_text("utf-8"))
    assert told["verified"] is True
    assert {path.name for path in out.iterdir()} == {*told["files"], "manifest.json"}
    if time.monotonic() - start > 5:
        assert "..." in done.stderr  # progress


@pytest.mark.slow
def test_build_without_verifying_says_so(tmp_path: Path) -> None:
    spec, out = tmp_path / "tiny.yaml", tmp_path / "out"
    spec.write_text(MINIMAL, "utf-8")
    done = run_process("build", str(spec), "-o", str(out), "--no-verify", "--target", "nvidia-l4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny for NVIDIA L4: unverified\n")
    assert json.loads((out / "manifest.json").read_text("utf-8"))["verified"] is False


def test_verify_prints_every_case(tmp_path: Path) -> None:
    spec = tmp_path / "tiny.yaml"
    spec.write_text(MINIMAL, "utf-8")
    done = run_process("verify", str(spec), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    first, *cases = done.stdout.splitlines()
    assert first.startswith("tiny: verified, ")
    assert sum(case.startswith("  ok ") for case in cases) == int(first.split()[2])


WRITING = (("list", "--json"), ("--help",))


def ended(command: tuple[str, ...], **streams: object) -> tuple[int, str]:
    """Exit code and standard error of a command with other standard streams."""
    done = subprocess.run(  # type: ignore[call-overload]
        [sys.executable, "-m", "flashgen", *command],
        text=True,
        check=False,
        env=environment(),
        **{"stderr": subprocess.PIPE, **streams},
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", WRITING, ids=" ".join)
def test_a_closed_pipe_is_no_error(command: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        assert ended(command, stdout=pipe) == (0, "")


@pytest.mark.parametrize("command", WRITING, ids=" ".join)
def test_a_closed_output_is_no_error(command: tuple[str, ...]) -> None:
    assert ended(command, preexec_fn=lambda: os.close(1)) == (0, "")


@pytest.mark.parametrize("command", WRITING, ids=" ".join)
def test_a_full_output_is_an_error(command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        code, said = ended(command, stdout=full)
    assert (code, said) == (1, "error: the output cannot be written (No space left on device)\n")


def test_errors_that_cannot_be_said_keep_their_code() -> None:
    with Path("/dev/full").open("w") as full:
        assert ended(("show", "no_such_spec"), stderr=full)[0] == 3
    assert ended(("show", "no_such_spec"), stderr=None, preexec_fn=lambda: os.close(2))[0] == 3
    closed = {"stdout": None, "stderr": None, "preexec_fn": lambda: os.closerange(0, 3)}
    assert ended(("show", "no_such_spec"), **closed)[0] == 3

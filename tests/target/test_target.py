from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from flashgen.dtypes import MATMUL_DTYPES
from flashgen.errors import TargetError
from flashgen.target import TARGETS, Target, get_target, target_from_device_name

REQUIRED = [
    "nvidia-a100-40gb",
    "nvidia-a100-80gb",
    "nvidia-a10",
    "nvidia-l4",
    "nvidia-l40s",
    "nvidia-rtx-3090",
    "nvidia-rtx-4090",
    "nvidia-rtx-5090",
    "nvidia-h100-sxm",
    "nvidia-h100-pcie",
    "nvidia-h200",
    "nvidia-b200",
    "amd-mi300x",
]

SMEM_PER_BLOCK = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}


def test_every_required_gpu_is_catalogued() -> None:
    assert list(TARGETS) == REQUIRED


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_figures_are_complete_and_have_sources(target: Target) -> None:
    assert TARGETS[target.id] is target
    assert target.smem_per_block_bytes == SMEM_PER_BLOCK[target.arch]
    assert target.smem_per_block_bytes <= target.smem_per_sm_bytes
    assert set(target.matmul_flops_per_s) <= set(MATMUL_DTYPES)
    assert {"fp16", "bf16", "tf32", "fp32"} <= set(target.matmul_flops_per_s)
    has_fp8 = target.arch not in ("sm_80", "sm_86")
    assert ("fp8_e4m3" in target.matmul_flops_per_s) == has_fp8
    assert len(target.sources) >= 2
    assert all(source.strip() for source in target.sources)
    assert any("limits:" in source for source in target.sources)
    if target.vendor == "nvidia":
        assert target.arch == f"sm_{target.compute_capability}"


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_rates_agree_with_clock_and_units(target: Target) -> None:
    """FLOPs per SM and clock are a power of two (B200's rate is stated for a lower clock: 6%)."""
    per_clock = target.matmul_flops_per_s["bf16"] / (target.sm_count * target.clock_hz)
    nearest = min((2**n for n in range(8, 14)), key=lambda size: abs(size - per_clock))
    assert per_clock == pytest.approx(nearest, rel=0.08)


def test_textbook_roofline_figures() -> None:
    a100 = TARGETS["nvidia-a100-40gb"]
    assert a100.matmul_flops_per_s["fp16"] == 312e12
    assert a100.dram_bytes_per_s == 1.555e12


DEVICE_NAMES = {
    "NVIDIA A100-SXM4-40GB": "nvidia-a100-40gb",
    "NVIDIA A100-PCIE-40GB": "nvidia-a100-40gb",
    "A100-SXM4-40GB": "nvidia-a100-40gb",
    "NVIDIA A100-SXM4-80GB": "nvidia-a100-80gb",
    "NVIDIA A100 80GB PCIe": "nvidia-a100-80gb",
    "NVIDIA A10": "nvidia-a10",
    "NVIDIA L4": "nvidia-l4",
    "NVIDIA L40S": "nvidia-l40s",
    "NVIDIA GeForce RTX 3090": "nvidia-rtx-3090",
    "NVIDIA GeForce RTX 4090": "nvidia-rtx-4090",
    "NVIDIA GeForce RTX 5090": "nvidia-rtx-5090",
    "NVIDIA H100 80GB HBM3": "nvidia-h100-sxm",
    "NVIDIA H100 PCIe": "nvidia-h100-pcie",
    "NVIDIA H200": "nvidia-h200",
    "nvidia  h200": "nvidia-h200",
    "NVIDIA B200": "nvidia-b200",
    "AMD Instinct MI300X": "amd-mi300x",
    "AMD Instinct MI300X OAM": "amd-mi300x",
}


@pytest.mark.parametrize(("name", "target_id"), DEVICE_NAMES.items())
def test_names_that_drivers_report(name: str, target_id: str) -> None:
    found = target_from_device_name(name)
    assert found is not None
    assert found.id == target_id


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "Tesla T4",
    ],
)
def test_a_relative_is_not_taken_for_a_catalogued_gpu(name: str) -> None:
    assert target_from_device_name(name) is None


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("h200", "nvidia-h200"),
        ("nvidia-h20", "nvidia-h200"),
        ("NVIDIA H200", "nvidia-h200"),
        ("nvidia_l40s", "nvidia-l40s"),
        ("mi300x", "amd-mi300x"),
    ],
)
def test_unknown_id_suggests_the_nearest_and_lists_all(wrong: str, meant: str) -> None:
    with pytest.raises(TargetError) as caught:
        get_target(wrong)
    message = str(caught.value)
    assert message.startswith(f"target: unknown GPU {wrong!r}\n  hint: did you mean '{meant}'?")
    assert all(known in message for known in TARGETS)
    assert caught.value.exit_code == 8


@pytest.mark.parametrize("wrong", ["", "zzz", None, {}])
def test_hopeless_ids_only_list(wrong: object) -> None:
    with pytest.raises(TargetError) as caught:
        get_target(wrong)  # type: ignore[arg-type]
    assert "did you mean" not in str(caught.value)
    assert ", ".join(TARGETS) in str(caught.value)


def test_targets_are_frozen_hashable_and_picklable() -> None:
    target = get_target("nvidia-h200")
    assert pickle.loads(pickle.dumps(target)) is target
    assert copy.deepcopy(target) is target
    assert {target: 1}[target] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        target.sm_count = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        target.matmul_flops_per_s["bf16"] = 0.0  # type: ignore[index]


def test_a_changed_target_keeps_its_changes_when_pickled() -> None:
    small = dataclasses.replace(get_target("nvidia-h200"), smem_per_block_bytes=1024)
    assert pickle.loads(pickle.dumps(small)) == small


def test_all_is_a_target_of_explain_alone() -> None:
    hint = "hint: only `flashgen explain` takes all targets; known targets: nvidia-a100-40gb"
    with pytest.raises(TargetError, match=hint):
        get_target("all")

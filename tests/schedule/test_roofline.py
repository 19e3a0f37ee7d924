from __future__ import annotations

import pytest

from flashgen.errors import TargetError
from flashgen.schedule.roofline import matmul_rate, roofline
from flashgen.target import get_target

A100 = get_target("nvidia-a100-40gb")


def test_naive_attention_is_capped_by_memory_on_an_a100() -> None:
    """N=2048, d=64, fp32: 15.94 FLOP/B, 25 TFLOP/s, 8% of the peak; critical intensity 200."""
    floor = roofline(1_094_713_344, 68_681_728, A100, "fp16")
    assert floor.intensity == pytest.approx(15.94, abs=0.005)
    assert floor.critical_intensity == pytest.approx(200, abs=1)
    assert floor.bound == "memory"
    reached = 1_094_713_344 / (floor.time_us * 1e-6)
    assert reached == pytest.approx(25e12, rel=0.02)
    assert reached / 312e12 == pytest.approx(0.08, abs=0.002)


def test_flash_attention_is_bound_by_compute() -> None:
    floor = roofline(4 * 8192**2 * 128, 4 * 2 * 8192 * 128, A100, "bf16")
    assert floor.bound == "compute"
    assert floor.time_us == floor.compute_us == pytest.approx(1e6 * 4 * 8192**2 * 128 / 312e12)


def test_no_work_takes_no_time() -> None:
    floor = roofline(0, 0, A100, "bf16")
    assert (floor.time_us, floor.intensity) == (0.0, 0.0)


def test_a_dtype_without_a_unit_is_named() -> None:
    with pytest.raises(TargetError) as caught:
        matmul_rate(A100, "fp8_e4m3")
    message = "nvidia-a100-40gb: has no fp8_e4m3 matmul unit (it has fp16, bf16, tf32, fp32)"
    assert str(caught.value) == message

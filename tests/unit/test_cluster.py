"""How many workers a Ray cluster has room for."""

from __future__ import annotations

import pytest

cluster = pytest.importorskip("freewheel.ray.book", reason="the extra `ray` is not installed")


@pytest.mark.parametrize(("gpus", "fit"), [(0.2, 5), (0.1, 10), (0.3, 3), (1, 1), (2, 0)])
def test_parts_of_a_gpu_are_counted_as_ray_counts_them(gpus, fit):
    assert cluster._fits({"GPU": 1.0, "CPU": 16.0}, {"GPU": gpus, "CPU": 1}) == fit

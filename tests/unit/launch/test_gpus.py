"""GPU selection for a rank, without GPUs."""

import pytest

from hvd_estimators import get_available_devices
from hvd_estimators.exceptions import GpuError
from hvd_estimators.launch import gpus
from hvd_estimators.launch.gpus import (
    assigned_gpus,
    check_gpus,
    describe_gpus,
    gpu_index,
    own_gpu,
    rank_gpus,
    visible_gpus,
)

UUID = "GPU-6a96bd74-6f0a-4e4c-b8a3-6bb3fd8f7d01"
MIG = "MIG-5b1d4d3a-0b0b-5d4a-9a3f-1f3f1c1a2b3c"


@pytest.fixture(autouse=True)
def devices(tmp_path, monkeypatch):
    """A machine without GPUs; files in this folder stand for the GPUs of a test."""
    monkeypatch.setattr(gpus, "_DEVICES", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("addresses", "outer", "expected"),
    [
        (["3"], None, ["3"]),
        (["3", "5"], None, ["3", "5"]),
        (["1"], "3,5", ["5"]),
        (["1", "0"], "3, 5", ["5", "3"]),
        (["0"], f"{UUID},5", [UUID]),
        ([UUID], "3,5", [UUID]),
        ([MIG], None, [MIG]),
        (["1"], f"{MIG},MIG-GPU-1/0/1", ["MIG-GPU-1/0/1"]),
    ],
)
def test_the_executors_visible_devices_map_spark_addresses(addresses, outer, expected):
    assert assigned_gpus(addresses, {"CUDA_VISIBLE_DEVICES": outer}) == expected


@pytest.mark.parametrize("outer", ["3,5", "3,5,-1,7", "3,5,none,7"])
def test_an_assigned_gpu_that_is_not_visible_is_an_error(outer):
    message = r"GPU 2 to a task on .* sees 2 \(CUDA_VISIBLE_DEVICES=.*discoveryScript"

    with pytest.raises(GpuError, match=message):
        assigned_gpus(["2"], {"CUDA_VISIBLE_DEVICES": outer})


def variables(addresses, gpus, local_rank, local_size, env=None):
    return rank_gpus(addresses, gpus, local_rank, local_size, env or {})


def test_a_rank_sees_exactly_its_assigned_gpus(monkeypatch):
    pinned = variables(["1", "0"], ["5", "3"], local_rank=1, local_size=2)

    assert pinned["CUDA_VISIBLE_DEVICES"] == "5,3"
    for name, value in pinned.items():
        monkeypatch.setenv(name, value)
    assert get_available_devices() == ["1", "0"]
    assert gpu_index(2, local_rank=1) == 0
    assert own_gpu(0)[1] == "5"


def test_the_local_rank_selects_a_visible_gpu_if_spark_assigned_none(devices):
    outer = {"CUDA_VISIBLE_DEVICES": f"7,{UUID}"}
    assert [variables([], [], i, 2, outer) for i in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "7"},
        {"CUDA_VISIBLE_DEVICES": UUID},
    ]
    # With more ranks than GPUs, the ranks choose for themselves.
    assert variables([], [], 2, 3, outer) == {}
    # GPUs cannot be counted without a framework.
    assert variables([], [], 0, 1) == {}

    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    assert visible_gpus({}) == ["0", "1"]
    assert variables([], [], 1, 2) == {"CUDA_VISIBLE_DEVICES": "1"}
    # Hidden from the executor.
    assert variables([], [], 0, 1, {"CUDA_VISIBLE_DEVICES": ""}) == {}


@pytest.mark.parametrize(("value", "gpus"), [("0", ["4"]), ("1", []), ("2", []), (None, ["4"])])
def test_a_variable_makes_the_local_rank_override_sparks_assignment(value, gpus):
    env = {"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": value}

    assert assigned_gpus(["4"], env) == gpus


def test_either_all_ranks_or_none_have_a_gpu():
    assert check_gpus([True, True])
    assert not check_gpus([False, False])
    with pytest.raises(GpuError, match=r"Ranks 1, 3 see no GPU .* use_gpu=False"):
        check_gpus([True, False, True, False])


def test_one_line_names_the_gpus_and_the_reducing_library():
    gpus = [("a", "0"), ("b", "0")]

    assert describe_gpus(gpus, "H100", nccl=True) == (
        "GPUs (H100): rank 0: 0 of a, rank 1: 0 of b. NCCL reduces between them."
    )
    assert "Gloo reduces between them. Several ranks share" in describe_gpus(
        [("a", "0")] * 2, "H100", nccl=False
    )
    with pytest.raises(GpuError, match=r"Ranks 0, 2 on a share the GPU 0.*num_proc"):
        describe_gpus([*gpus, ("a", "0")], "H100", nccl=True)

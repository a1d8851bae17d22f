"""Which GPU a rank uses; arithmetic, without GPUs."""

import itertools

import pytest

from hvd_estimators.launch.gpu import check_gpus, gpu_index, visible_gpu
from hvd_estimators.launch.rendezvous import assign_ranks


@pytest.mark.parametrize(
    ("addresses", "local_rank", "env", "expected"),
    [
        ([], 1, {}, None),
        ([], 1, {"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": "1"}, None),
        (["3"], 1, {}, "3"),
        (["3", "5"], 1, {}, "3"),
        (["3"], 1, {"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": "0"}, "3"),
        (["3"], 1, {"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": "1"}, "1"),
        (["3"], 1, {"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": None}, "3"),
    ],
)
def test_a_rank_sees_the_gpu_that_spark_assigned(addresses, local_rank, env, expected):
    pinned = visible_gpu(addresses, local_rank, env)

    assert pinned == ({} if expected is None else {"CUDA_VISIBLE_DEVICES": expected})


def test_ranks_of_one_host_see_different_gpus_by_local_rank():
    env = {"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": "1"}

    slots = assign_ranks(["a", "b", "a", "b"])

    for host, group in itertools.groupby(sorted(slots, key=lambda s: s.rank), lambda s: s.hostname):
        gpus = [visible_gpu(["0"], s.local_rank, env)["CUDA_VISIBLE_DEVICES"] for s in group]
        assert gpus == ["0", "1"], host


def test_ranks_that_are_not_pinned_share_out_what_they_see():
    slots = assign_ranks(["a", "a", "a", "b"])

    assert [gpu_index(2, slot.local_rank) for slot in slots] == [0, 1, 0, 0]
    assert [gpu_index(1, slot.local_rank) for slot in slots] == [0, 0, 0, 0]
    assert gpu_index(0, 1) is None


def test_all_ranks_have_a_gpu_or_none_has():
    assert check_gpus([True, True])
    assert not check_gpus([False, False])
    with pytest.raises(RuntimeError, match=r"Ranks 1, 3 see no GPU .* use_gpu=False"):
        check_gpus([True, False, True, False])

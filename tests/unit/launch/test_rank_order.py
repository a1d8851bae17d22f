"""Assignment of ranks to tasks, and the environment of each rank."""

from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from hypothesis import given
from hypothesis import strategies as st

from hvd_estimators.launch.rank.environment import (
    IDENTITY_VARIABLES,
    Master,
    assign_ranks,
    rank_environment,
    torchrun_environment,
)


def test_ranks_of_a_host_are_contiguous_for_any_task_order():
    slots = assign_ranks(["b", "a", "b", "a", "b"])

    assert [slot.hostname for slot in slots] == ["b", "a", "b", "a", "b"]
    assert [slot.rank for slot in slots] == [0, 3, 1, 4, 2]
    assert [slot.local_rank for slot in slots] == [0, 0, 1, 1, 2]
    assert [slot.local_size for slot in slots] == [3, 2, 3, 2, 3]
    # Across hosts: ranks with the same local rank; only "b" has a third.
    assert [slot.cross_rank for slot in slots] == [0, 1, 0, 1, 0]
    assert [slot.cross_size for slot in slots] == [2, 2, 2, 2, 1]


def test_the_environment_identifies_the_rank():
    slot = assign_ranks(["a", "b", "a"])[2]

    env = rank_environment(slot)

    assert env == {
        "HOROVOD_HOSTNAME": "a",
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "3",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_slots_match_horovods_launcher(hosts):
    names = list(dict.fromkeys(hosts))
    of_horovod = get_host_assignments([HostInfo(name, hosts.count(name)) for name in names], 1)

    slots = sorted(assign_ranks(hosts), key=lambda slot: slot.rank)

    for slot, theirs in zip(slots, of_horovod, strict=True):
        assert vars(slot).items() >= vars(theirs).items()
        assert (slot.host_number, slot.num_hosts) == (names.index(slot.hostname), len(names))


MASTER = Master("10.0.0.1", 1234, "run")


def test_the_environment_matches_torchrun():
    slots = assign_ranks(["a", "b", "b"])

    env = torchrun_environment(slots[2], MASTER, has_own_gpus=False)

    assert {name: value for name, value in env.items() if value is not None} == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    # Variables of a torchrun that started the driver do not reach the ranks.
    assert {name for name in IDENTITY_VARIABLES if env[name] is None} == {
        "NODE_RANK",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_MAX_RESTARTS",
    }


def test_a_rank_that_sees_only_its_own_gpu_has_local_rank_0():
    slot = assign_ranks(["a", "b", "b"])[2]

    env = torchrun_environment(slot, MASTER, has_own_gpus=True)

    local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [env[name] for name in local] == ["0", "1", "2", "3"]

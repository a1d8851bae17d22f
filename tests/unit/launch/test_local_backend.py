"""Ranks as subprocesses of this process."""

import contextlib
import functools
import os
import sys
import time
import types
from pathlib import Path

import cloudpickle
import psutil
import pytest

from hvd_estimators.exceptions import DependencyError, ParamError, WorkerFailedError
from hvd_estimators.launch import SparkBackend, local_backend
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.launch.rank import supervisor
from hvd_estimators.launch.rank.environment import IDENTITY_VARIABLES
from hvd_estimators.launch.service.events import EventSender, RankOutput, RankProgress

# A rank must not import this module, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.timeout(90)


def rank():
    return int(os.environ["HOROVOD_RANK"])


@pytest.fixture
def short_grace(monkeypatch):
    """End ranks that sleep soon after another one has failed."""
    monkeypatch.setattr("hvd_estimators.launch.rank.supervisor._GRACE_SECONDS", 0.2)


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left


def test_results_are_in_rank_order():
    def work(base, *, factor):
        time.sleep(0.3 * (2 - rank()))
        return base + factor * rank(), os.environ["HOROVOD_SIZE"], os.environ["HOROVOD_LOCAL_RANK"]

    backend = LocalBackend(3)

    assert backend.num_processes() == 3
    assert backend.run(work, (100,), {"factor": 5}) == [
        (100, "3", "0"),
        (105, "3", "1"),
        (110, "3", "2"),
    ]


def test_ranks_reduce_repeatedly_and_reject_strangers():
    def work(driver):
        import http.client

        import horovod.torch as hvd
        import torch

        def listening(process):
            return {
                place.laddr.ip
                for place in process.net_connections(kind="inet")
                if place.status == psutil.CONN_LISTEN
            }

        def ask(method):
            port = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
            connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
            connection.request(method, "/global/0")
            return connection.getresponse().status

        sums = []
        for _ in range(2):
            hvd.init()
            sums.append(float(hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)))
            processes = [psutil.Process(), psutil.Process().parent(), psutil.Process(driver)]
            places = set().union(*map(listening, processes))
            answers = [ask("GET"), ask("PUT"), ask("DELETE")]
            hvd.shutdown()
        return sums, places, answers, psutil.Process().cmdline()

    for sums, places, answers, command in LocalBackend(2).run(work, [os.getpid()]):
        assert sums == [3.0, 3.0]
        assert places == {"127.0.0.1"}
        assert answers == [401, 401, 401]
        assert not [word for word in command if len(word) == 64]


def test_an_unpatched_horovod_is_an_error_only_for_programs_that_use_it(monkeypatch, tmp_path):
    def init():
        from horovod.common.basics import HorovodBasics

        HorovodBasics().init()

    # As released, without the record of a build.
    basics = tmp_path / "horovod" / "common" / "basics.py"
    basics.parent.mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    basics.write_text("class HorovodBasics:\n    def init(self): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("hvd_estimators.launch.horovod_build.installed_revision", lambda: 0)
    backend = LocalBackend(2)

    assert backend.run(rank) == [0, 1]
    for call in (backend.check_horovod, functools.partial(backend.run, init)):
        with pytest.raises(DependencyError, match="hvd-estimators build-horovod"):
            call()


def test_threads_of_ranks_share_the_cores_that_the_driver_may_use(monkeypatch):
    monkeypatch.setattr(local_backend, "available_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = LocalBackend(2).run(lambda: os.environ["OMP_NUM_THREADS"])
    assert threads == ["3", "3"]


def test_ranks_get_torchruns_variables_but_not_those_of_the_drivers_launcher(monkeypatch):
    of_driver = {name: "7" for name in (*IDENTITY_VARIABLES, "MASTER_ADDR", "MASTER_PORT")}
    for name, value in of_driver.items():
        monkeypatch.setenv(name, value)

    ranks = LocalBackend(2).run(lambda: dict(os.environ))

    assert [(env["RANK"], env["LOCAL_RANK"], env["GROUP_RANK"]) for env in ranks] == [
        ("0", "0", "0"),
        ("1", "1", "0"),
    ]
    for env in ranks:
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert not [name for name in of_driver if env.get(name) == "7"]
        assert "NODE_RANK" not in env
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert ranks[0][name] == ranks[1][name]


def test_env_may_set_the_master_port_but_not_a_rank():
    env = {"MASTER_PORT": "29500", "RANK": None}
    (found,) = LocalBackend(1, env=env).run(lambda: dict(os.environ))
    assert (found["MASTER_PORT"], "RANK" in found) == ("29500", False)

    for call in (
        lambda: LocalBackend(2, env={"LOCAL_RANK": "0"}),
        lambda: LocalBackend(2).run(rank, env={"LOCAL_RANK": "0"}),
        lambda: SparkBackend(2, env={"LOCAL_RANK": "0"}),
    ):
        with pytest.raises(ParamError, match=r"^env: LOCAL_RANK differs between ranks.*'0'"):
            call()


def test_variables_are_inherited_overridden_and_deleted(monkeypatch):
    names = kept, replaced, deleted, restored = [f"OMP_{number}" for number in range(4)]
    for name in names:
        monkeypatch.setenv(name, "driver")
    backend = LocalBackend(
        1, env={replaced: "backend", deleted: "backend", restored: None, "OWN": "backend"}
    )

    (env,) = backend.run(
        lambda: dict(os.environ), env={replaced: "run", deleted: None, restored: "run"}
    )

    assert (env[kept], env[replaced], env[restored]) == ("driver", "run", "run")
    assert env["OWN"] == "backend"
    assert deleted not in env


def test_ranks_can_import_the_modules_of_the_driver(tmp_path, monkeypatch):
    (tmp_path / "module_of_the_driver.py").write_text("ANSWER = 42")
    monkeypatch.syspath_prepend(str(tmp_path))

    def work():
        import module_of_the_driver

        return module_of_the_driver.ANSWER

    assert LocalBackend(1).run(work) == [42]


@pytest.mark.usefixtures("short_grace")
def test_an_exception_ends_the_other_ranks_and_is_raised_with_its_traceback():
    def work():
        print("output of rank", rank())
        if rank() == 1:
            raise LookupError("no such thing")
        time.sleep(300)

    started = time.monotonic()
    with pytest.raises(WorkerFailedError) as raised:
        LocalBackend(2).run(work)

    error = raised.value
    assert time.monotonic() - started < 30
    assert error.rank == 1
    assert error.host in str(error)
    assert "Rank 1" in str(error)
    assert "LookupError: no such thing" in str(error)
    assert "in work\n" in str(error)
    assert error.output_tail.startswith("output of rank 1\n")
    assert "output of rank 0" not in str(error)


def test_a_rank_whose_peer_died_inside_a_reduction_is_not_blamed():
    def work():
        import horovod.torch as hvd
        import torch

        hvd.init()
        hvd.allreduce(torch.ones(1), name="first")
        if hvd.rank() == 1:
            os._exit(9)
        hvd.allreduce(torch.ones(1), name="second")

    with pytest.raises(WorkerFailedError, match="exited with status 9") as raised:
        LocalBackend(2).run(work)

    assert raised.value.rank == 1


def test_an_interrupted_driver_leaves_no_ranks(tmp_path, monkeypatch):
    def work(folder):
        Path(folder, os.environ["HOROVOD_RANK"]).touch()
        time.sleep(300)

    def interrupt(seconds):
        time.sleep(seconds)
        if len(list(tmp_path.iterdir())) == 2:
            raise KeyboardInterrupt

    clock = types.SimpleNamespace(sleep=interrupt, monotonic=time.monotonic)
    monkeypatch.setattr(supervisor, "time", clock)

    with pytest.raises(KeyboardInterrupt):
        LocalBackend(2).run(work, (str(tmp_path),))


@pytest.mark.parametrize(("verbose", "shown"), [(1, False), (2, True)])
def test_output_of_ranks_is_shown_on_request(capfd, verbose, shown):
    LocalBackend(1, verbose=verbose).run(lambda: print("hello"))

    assert ("[0] hello\n" in capfd.readouterr().err) == shown


def test_output_and_progress_go_to_the_handler(capfd):
    progress = RankProgress(1, epoch=0, epochs=1, step=2, steps=3, rows_per_second=4.5)

    def work():
        if rank():
            with contextlib.closing(EventSender()) as sender:
                sender.send(progress)
        else:
            print("hello")

    for verbose, lines in ((1, []), (2, [RankOutput(0, "hello\n")])):
        heard = []
        LocalBackend(2, verbose=verbose).run(work, on_event=heard.append)
        assert [e for e in heard if isinstance(e, RankProgress)] == [progress]
        assert [e for e in heard if isinstance(e, RankOutput)] == lines
    assert "hello" not in capfd.readouterr().err


def test_the_number_of_ranks_defaults_to_the_number_of_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5}, raising=False)

    assert [LocalBackend(n).num_processes() for n in (0, None, 2)] == [3, 3, 2]
    assert LocalBackend().num_processes() == 1
    with pytest.raises(ParamError, match="num_proc: expected 0 or more, found -1"):
        LocalBackend(-1)

"""Tells Lightning its rank, as Horovod has it."""

from __future__ import annotations

import os

import horovod.torch as hvd

from hvd_estimators.lightning.bases import ClusterEnvironment

__all__ = ["HorovodEnvironment"]


class HorovodEnvironment(ClusterEnvironment):
    """The ranks of a Horovod job that something else has started."""

    @property
    def creates_processes_externally(self) -> bool:
        """Whether Lightning starts no processes: True."""
        return True

    @property
    def main_address(self) -> str:
        """The address at which Horovod's ranks meet."""
        return os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The port at which Horovod's ranks meet; 0 if there is only one rank."""
        return int(os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", 0))

    @staticmethod
    def detect() -> bool:
        """Return whether this process was started as a Horovod rank."""
        return "HOROVOD_RANK" in os.environ

    def world_size(self) -> int:
        """Return the number of ranks."""
        return int(hvd.size())

    def set_world_size(self, size: int) -> None:
        """Do nothing: Horovod knows."""

    def global_rank(self) -> int:
        """Return this rank."""
        return int(hvd.rank())

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: Horovod knows."""

    def local_rank(self) -> int:
        """Return this rank's number on its machine."""
        return int(hvd.local_rank())

    def node_rank(self) -> int:
        """Return the machine's number."""
        return int(hvd.cross_rank())

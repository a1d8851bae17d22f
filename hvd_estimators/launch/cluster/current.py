"""The application that launching asks, of whichever kind its session is. Runs on the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_estimators.launch.cluster.application import Cluster
from hvd_estimators.launch.cluster.connect import ConnectCluster
from hvd_estimators.sessions import current_session, is_connect

if TYPE_CHECKING:
    from hvd_estimators.launch.cluster.profiles import TaskResources

__all__ = ["current_cluster"]


def current_cluster(resources: TaskResources | None = None) -> Cluster:
    """Return the application of `current_session`.

    Parameters
    ----------
    resources : TaskResources, optional
        What tasks ask for.

    Raises
    ------
    SlotsError
        If the cluster manager has no such resources.
    """
    session = current_session()
    if is_connect(session):
        return ConnectCluster(session, resources)
    context = session.sparkContext
    return Cluster(context, None if resources is None else resources.on(context), session)

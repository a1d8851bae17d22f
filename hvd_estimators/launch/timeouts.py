"""Time limits of launches, in seconds.

Limits of one process, such as a rank's guardian or an executor's warm process, are in the modules
of these processes. Modules read a limit when they need it (``timeouts.NAME``).
"""

from __future__ import annotations

from dataclasses import dataclass

GLOO_TIMEOUT_VARIABLE = "HOROVOD_GLOO_TIMEOUT_SECONDS"
"""Environment variable of Horovod with the value that `GLOO_TIMEOUT` is the default of."""

GLOO_TIMEOUT = "120"
"""Seconds for which ranks wait for each other within Gloo, unless the user sets another value.

Horovod's default of 30 s is too short. After a link was down for 25 s, TCP may take twice as long
to resume, because the pauses between its attempts double. A lost task is reported well before this
timeout.
"""


@dataclass(frozen=True)
class Patience:
    """Time limits of a rank's task that waits for another task.

    Attributes
    ----------
    attempt : float
        Time to wait for a connection before another attempt.
    refused : float
        Time to retry while connections are refused, because the other task does not listen.
    silence : float
        Time to wait for any answer, because a link may be down or a process stopped.
    pause : float
        Pause between two attempts to connect.
    beat : float
        Interval between two heartbeats of a task.
    """

    attempt: float = 5.0
    refused: float = 15.0
    silence: float = 60.0
    pause: float = 0.2
    beat: float = 1.0


# Connections (`hvd_estimators.launch.rendezvous.channel`)

# Pause of a listener that cannot accept a connection, for example without free file descriptors.
LISTENER_PAUSE = 0.05
# Interval at which a listener that drains looks for open connections.
LISTENER_DRAIN_POLL = 0.01

# Driver's service (`hvd_estimators.launch.service`)

# Connection, proof of the secret, and first message.
SERVICE_CONNECT = 10.0

# Wait for the messages of all tasks, from the first message on, because Python may start late.
EXCHANGE = 8.0
# The same wait in a task, whose driver may be slow.
EXCHANGE_WAIT = 60.0
# Transfer of the messages of all tasks, about 100 MB to 1,000 tasks.
EXCHANGE_ANSWER = 20.0

# A rank does not wait longer for a driver that may be unreachable.
EVENT_CONNECT = 5.0
# Sending of one event, unless the sender sets another limit.
EVENT_SEND = 5.0
# Sending of output and messages. The driver may be slow, such as a sleeping laptop.
OUTPUT_SEND = 3600.0
# Pause between two events, which may be days apart. A limit has less than 2**31 ms.
EVENT_IDLE = 20 * 86400.0
# Completion of an event that has begun. A rank may be stopped while it sends one.
EVENT_COMPLETE = 60.0
# Wait for connected ranks at the end of a launch, as long as no event arrives.
EVENT_DRAIN = 1.0
# Wait for the handler to process the last events, while events still arrive.
LAST_EVENTS = 60.0

# Each MiB of a committed state, and the connection for it. The driver's disk may be slow.
COMMIT_MESSAGE = 120.0
# Wait of a rank while others fetch the state.
FETCH_TURN = 3600.0

# The driver warns of ranks that stay in a stage of the launch for this time.
STAGE_WARNING = 10.0
# Interval at which the driver looks at the stages.
STAGE_POLL = 0.5
# Sending of a task's last stage, at the end of its rank.
STAGE_CLOSE = 1.0

# Preemption (`hvd_estimators.launch.rank.preemption`, `hvd_estimators.launch.cluster`)

# Interval of preemption_check, and of asking Spark for decommissioned executors. Clouds give notice
# 30 s or more before a machine goes.
PREEMPTION_POLL = 2.0

# Rendezvous (`hvd_estimators.launch.rendezvous`)

# Wait for a key of another rank, after which the request is repeated.
RENDEZVOUS_KEY = 0.5
# Request of a rank's Horovod on the loopback interface.
GLOO_REQUEST = 5.0

# Spark jobs (`hvd_estimators.launch.cluster`)

# Interval at which Spark is asked for slots, started tasks and ended jobs.
SPARK_POLL = 0.2
# End of a background job after its cancellation.
JOB_CANCEL = 10.0
# Wait for the job that imports modules, at the end of the work beside it.
IMPORT_JOB = 2.0
# Wait for further executors after the last one has registered. The first may take longer.
EXECUTORS_SETTLED = 10.0
# The same wait if more executors are needed, and their final number is unknown.
EXECUTORS_LATE = 60.0
# Arrival of requested executors, after which they must be requested again.
EXECUTORS_REQUESTED = 30.0
# Spark's information about a failed task, which arrives a moment after the failure.
TASK_STATUS = 2.0
TASK_STATUS_POLL = 0.1

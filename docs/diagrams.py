"""Draw the diagrams of the README, the deployment pages and the design into ``docs/_static``.

``python docs/diagrams.py`` writes all of them. They have a white background, because a forge shows
them as images, which do not know the page's colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "_static"

LARGE = ".head { font-size: 20px; } .line { font-size: 17px; } .port { font-size: 16px; }\n"
"""Sizes of a picture that is also shown on phones, where it cannot scroll."""

STYLE = """\
text { fill: #1b1f24; }
text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
.head { font-size: 16px; font-weight: 600; }
.line { font-size: 14px; }
.port { font-size: 13px; fill: #57606a; }
.box { fill: #f3f4f6; stroke: #8c959f; }
.machine { fill: #ffffff; stroke: #8c959f; stroke-dasharray: 5 4; }
.process { fill: #dcebfa; stroke: #2a78d6; }
.store { fill: #fbeeda; stroke: #d98a1c; }
.arrow { fill: none; stroke: #1b1f24; stroke-width: 1.6; marker-end: url(#tip); }
.both { stroke: #2a78d6; marker-start: url(#tip); }
"""

TIP = (
    '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="context-stroke"/></marker></defs>'
)


def box(x: int, y: int, width: int, height: int, head: str, *lines: str, kind: str = "box") -> str:
    """Return a box with a heading and lines of text, centred."""
    first = y + height / 2 - 11 * len(lines) + 6
    texts = [("head", head), *(("line", line) for line in lines)]
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>' + (
        "".join(
            f'<text class="{name}" x="{x + width / 2:g}" y="{first + 22 * number:g}"'
            f' text-anchor="middle">{escape(text)}</text>'
            for number, (name, text) in enumerate(texts)
        )
    )


def label(x: int, y: int, text: str, name: str = "port", anchor: str = "middle") -> str:
    """Return a text at a place."""
    return f'<text class="{name}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def arrow(path: str, *, both: bool = False) -> str:
    """Return an arrow along a path, with one tip or two."""
    return f'<path class="arrow{" both" if both else ""}" d="{path}"/>'


def svg(width: int, height: int, title: str, parts: Sequence[str], style: str = STYLE) -> str:
    """Return a picture of its parts."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{style}</style>",
            TIP,
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def overview() -> str:
    """Return the README's picture of the data flow."""
    parts = [
        box(20, 24, 150, 76, "DataFrame", "features, labels"),
        arrow("M172 62H224"),
        box(228, 24, 170, 76, "Parquet files", "in the store", kind="store"),
        arrow("M400 62H456"),
        label(428, 52, "rows"),
        box(460, 24, 170, 60, "process 0", "a part of the rows", kind="process"),
        box(460, 104, 170, 60, "process 1", "a part of the rows", kind="process"),
        label(545, 186, "…", "head"),
        box(460, 200, 170, 60, "process N-1", "a part of the rows", kind="process"),
        arrow("M545 86V102", both=True),
        label(450, 134, "gradients of each", "port", "end"),
        label(450, 155, "step are averaged", "port", "end"),
        arrow("M458 230H402"),
        box(228, 192, 170, 76, "model", "a Spark ML stage"),
        arrow("M226 230H174"),
        box(20, 192, 150, 76, "transform", "predictions"),
    ]
    return svg(
        650,
        290,
        "A DataFrame is written as Parquet to the store; N processes train on its rows and average"
        " their gradients; the fitted model transforms DataFrames.",
        parts,
        STYLE + LARGE,
    )


@dataclass(frozen=True)
class Topology:
    """The machines of a cluster and the ports between them.

    Attributes
    ----------
    client : tuple of str
        What runs on the user's machine.
    to_driver : str
        Ports from there to the driver.
    driver : tuple of str
        What the driver's machine is.
    to_executors : str
        Ports between driver and executors.
    machine : str
        The kind of machine that runs an executor.
    between : str
        Ports between the processes that train.
    store : tuple of str
        Where the store is.
    to_store : str
        Ports to the store.
    """

    client: tuple[str, ...]
    to_driver: str
    driver: tuple[str, ...]
    to_executors: str
    machine: str
    between: str
    store: tuple[str, ...]
    to_store: str


TOPOLOGIES: Mapping[str, Topology] = {
    "yarn": Topology(
        ("your machine", "spark-submit"),
        "YARN's own",
        ("driver", "a container, or your machine"),
        "spark.driver.port, block managers",
        "YARN node",
        "ephemeral ports",
        ("store", "HDFS or object storage"),
        "HDFS: 8020, 9866",
    ),
    "standalone": Topology(
        ("master", "requests the executors"),
        "7077",
        ("your machine", "submit.sh, with the driver"),
        "7100-7136 to the driver, 7140-7156 back",
        "worker",
        "40000-44999",
        ("store", "a mounted folder or a URL"),
        "",
    ),
    "kubernetes": Topology(
        ("your machine", "submit.sh"),
        "6443",
        ("driver pod", "the image's Spark"),
        "7078, 7079",
        "executor pod",
        "40000-44999",
        ("store", "a volume, or S3"),
        "443",
    ),
    "databricks": Topology(
        ("your machine", "asset bundle or notebook"),
        "443",
        ("driver node", "of the cluster"),
        "all ports: the security group allows itself",
        "worker node",
        "all ports",
        ("store", "/Volumes/… or dbfs:/…"),
        "mounted",
    ),
    "connect": Topology(
        ("clients", "thin PySpark, one per user"),
        "15002",
        ("server", "the driver of all users"),
        "spark.driver.port, block managers",
        "machine of the cluster",
        "ephemeral ports",
        ("store", "a URL or a mounted folder"),
        "",
    ),
}


def topology(name: str) -> str:
    """Return the picture of a cluster."""
    it = TOPOLOGIES[name]
    parts = [
        box(20, 20, 220, 64, *it.client),
        arrow("M406 52H244" if name == "standalone" else "M242 52H404"),
        label(323, 44, it.to_driver),
        box(408, 20, 222, 64, *it.driver),
        arrow("M519 86V106H140V130"),
        arrow("M519 86V130"),
        label(330, 124, it.to_executors),
    ]
    for left, number in ((20, 0), (390, 1)):
        parts += [
            f'<rect class="machine" x="{left}" y="134" width="240" height="134" rx="8"/>',
            label(left + 120, 154, f"{it.machine} {number + 1}", "line"),
            box(left + 16, 164, 208, 34, "executor: a task"),
            box(left + 16, 218, 208, 38, f"process {number}", kind="process"),
            arrow(f"M{left + 120} 198V216"),
            arrow(f"M{left + 120} 270V306"),
        ]
    parts += [
        arrow("M246 237H404", both=True),
        label(325, 229, it.between),
        box(20, 310, 610, 56, *it.store, kind="store"),
    ]
    if it.to_store:
        parts.append(label(325, 294, it.to_store))
    title = f"{it.driver[0]}, executors with one process each, and the store, with their ports."
    return svg(650, 384, title, parts)


DRIVER, TASK_0, TASK, RANK = range(4)
ACTORS = ("driver", "task of rank 0", "another task", "its rank")
LIFELINES = (90, 320, 560, 790)
"""Where the lines of the driver, the tasks and the rank are."""


@dataclass(frozen=True)
class MessageSequence:
    """Messages between driver, tasks and ranks, in their order.

    Attributes
    ----------
    title : str
        What the picture shows.
    steps : sequence of (int, int, str, str)
        Sender, receiver, message, and the module of ``hvd_estimators/launch`` that sends it. A
        message to the sender itself is an action.
    """

    title: str
    steps: Sequence[tuple[int, int, str, str]]


SEQUENCES: Mapping[str, MessageSequence] = {
    "launch": MessageSequence(
        "A launch: from the Spark job to the results of the ranks.",
        (
            (DRIVER, TASK, "barrier job: the call, a secret, an address", "spark_backend.py"),
            (TASK, DRIVER, "facts: address, problems found", "service/exchange.py"),
            (DRIVER, TASK, "facts of all tasks", "service/exchange.py"),
            (TASK, TASK, "choose addresses", "task/addresses.py"),
            (TASK_0, TASK_0, "listen for the other tasks", "rendezvous/server.py"),
            (TASK, TASK_0, "connect; heartbeat each second", "rendezvous/client.py"),
            (TASK, RANK, "start it, and its guardian", "rank/process.py"),
            (RANK, TASK, "where this rank listens", "rendezvous/gloo_http.py"),
            (TASK, TASK_0, "keys for the other ranks", "rendezvous/client.py"),
            (TASK, DRIVER, "stages, and the rank's output", "task/output.py"),
            (RANK, RANK, "train with the other ranks", "rank/worker.py"),
            (RANK, DRIVER, "epochs, progress, messages", "service/events.py"),
            (RANK, TASK, "outcome, in its memory file", "rank/worker.py"),
            (TASK, DRIVER, "outcome, as a row of the job", "task/run.py"),
            (DRIVER, DRIVER, "results by rank", "rank/outcome.py"),
        ),
    ),
    "failure": MessageSequence(
        "A rank raises an exception: from the rank to the next launch.",
        (
            (RANK, TASK, "traceback; is it transient?", "rank/outcome.py"),
            (TASK, TASK_0, "failed: rank, host, reason", "rank/supervisor.py"),
            (TASK_0, TASK_0, "end its own rank after 3 s", "rank/supervisor.py"),
            (TASK_0, TASK, "failed: with each heartbeat's answer", "rendezvous/server.py"),
            (TASK, RANK, "end it after 3 s, if it runs", "rank/supervisor.py"),
            (TASK, DRIVER, "outcomes of all ranks", "task/run.py"),
            (DRIVER, DRIVER, "name the first failure", "rank/outcome.py"),
            (DRIVER, TASK, "launch again, if it is transient", "relaunch.py"),
        ),
    ),
}


def sequence(name: str) -> str:
    """Return the picture of a sequence of messages."""
    it = SEQUENCES[name]
    top, step = 60, 42
    bottom = top + step * len(it.steps) + 20
    parts = [label(890, 34, "hvd_estimators/launch/", "port", "start")]
    for x, actor in zip(LIFELINES, ACTORS, strict=True):
        parts.append(
            box(x - 76, 14, 152, 34, actor, kind="process" if actor == ACTORS[RANK] else "box")
        )
        parts.append(f'<path class="machine" d="M{x} 50V{bottom}"/>')
    for number, (sender, receiver, text, module) in enumerate(it.steps, 1):
        y = top + step * number
        start, end = LIFELINES[sender], LIFELINES[receiver]
        if sender == receiver:
            parts.append(f'<circle class="process" cx="{start}" cy="{y - 6}" r="6"/>')
            # Beside the line, on the side with more room.
            is_left = sender in (TASK, RANK)
            side = (start - 12, "end") if is_left else (start + 12, "start")
            parts.append(label(side[0], y - 1, text, "line", side[1]))
        else:
            parts.append(arrow(f"M{start} {y}H{end + (4 if end < start else -4)}"))
            parts.append(label((start + end) // 2, y - 7, text, "line"))
        parts.append(label(890, y - 3, module, "port", "start"))
    halo = ".line { paint-order: stroke; stroke: #ffffff; stroke-width: 5px; }\n"
    return svg(1070, bottom + 20, it.title, parts, STYLE + halo)


def diagrams() -> dict[str, str]:
    """Return all pictures by the names of their files."""
    found = {f"topology_{name}.svg": topology(name) for name in TOPOLOGIES}
    found |= {f"sequence_{name}.svg": sequence(name) for name in SEQUENCES}
    return {"overview.svg": overview(), **found}


def main() -> None:
    """Write all pictures."""
    for name, text in diagrams().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

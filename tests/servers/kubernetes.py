"""Kubernetes' API for one Spark application, whose pods are network namespaces of this machine.

The pods are what Spark requests: their command, variables, volumes, system settings and labels. All
of them run in the same root folder, and a network policy decides what they can connect to. Needs
root's rights, iproute2 and nftables.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import threading
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from debian_root import DebianRoot
from dockerfile import Image

BRIDGE = "hvdk8s"
NETWORK = "10.77.0"
NAMESPACE = "training"
PORT = 6443
"""Port of the API, one of those that deploy/kubernetes/network-policy.yaml opens."""

Object = dict[str, Any]


class Kubernetes:
    """API server and node; used as a context manager.

    Parameters
    ----------
    root : DebianRoot
        The files of the image.
    image : Image
        The image's settings.
    policy : dict
        The ``NetworkPolicy``.
    claims : mapping
        Name of each ``PersistentVolumeClaim`` to its folder.
    folder : Path
        Folder for volumes and for the output of pods.

    Attributes
    ----------
    address : str
        URL of the API.
    pods : dict
        The pods that have been created, by name.
    """

    def __init__(
        self,
        root: DebianRoot,
        image: Image,
        policy: Object,
        claims: Mapping[str, Path],
        folder: Path,
    ) -> None:
        self._root, self._image, self._policy = root, image, policy
        self._claims, self._folder = claims, folder
        self.address = f"http://{NETWORK}.1:{PORT}"
        self.pods: dict[str, Pod] = {}
        self.objects: dict[tuple[str, str], Object] = {}
        self.changed = threading.Condition()
        self._numbers = itertools.count(2)

    def __enter__(self) -> Kubernetes:
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "address", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        handler = type("Handler", (_Handler,), {"kubernetes": self})
        self._server = ThreadingHTTPServer((f"{NETWORK}.1", PORT), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for pod in self.pods.values():
            pod.remove()
        _run("ip", "link", "delete", BRIDGE)

    def create(self, kind: str, given: Object) -> Object:
        """Store an object, and start it if it is a pod."""
        given["metadata"].update(uid=str(uuid.uuid4()), resourceVersion="1", namespace=NAMESPACE)
        given["metadata"].setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        with self.changed:
            self.objects[kind, given["metadata"]["name"]] = given
            self.changed.notify_all()
        if kind == "pods":
            pod = Pod(given, next(self._numbers), self._folder / given["metadata"]["name"])
            self.pods[pod.name] = pod
            threading.Thread(target=self._start_or_fail, args=[pod], daemon=True).start()
        return given

    def delete(self, kind: str, names: Sequence[str]) -> None:
        """Delete objects, and end the pods among them."""
        for name in names:
            with self.changed:
                self.objects.pop((kind, name), None)
            if kind == "pods" and name in self.pods:
                self.pods[name].stop()

    def _start_or_fail(self, pod: Pod) -> None:
        try:
            self._start(pod)
        except Exception:
            pod.log.write_text(traceback.format_exc())
            pod.end(1)

    def _start(self, pod: Pod) -> None:
        self._await_services(pod)
        mounts = dict(self._mounts(pod))
        pod.open_network(self._policy)
        environment = {**self._image.environment, "HOME": "/opt/spark/work-dir"}
        fields = {"status.podIP": pod.address, "metadata.name": pod.name}
        for variable in pod.container["env"]:
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = fields[field] if field else variable.get("value", "")
            environment[variable["name"]] = value
        command = self._root.command(
            [*self._image.entrypoint, *pod.container["args"]],
            environment=environment,
            folder=self._image.folder,
            user=str(pod.spec["securityContext"]["runAsUser"]),
            mounts=mounts,
            within=[
                *("ip", "netns", "exec", pod.namespace, "unshare", "--uts"),
                *("sh", "-ec", 'hostname "$0" && exec "$@"', pod.name),
            ],
        )
        pod.start(command)

    def _await_services(self, pod: Pod) -> None:
        """Wait for what Spark creates after the driver's pod; its service resolves to the pod."""
        names = [v["configMap"]["name"] for v in pod.spec["volumes"] if "configMap" in v]
        is_driver = pod.container["args"][0] == "driver"
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    all(("configmaps", name) in self.objects for name in names)
                    and any(kind == "services" for kind, _ in self.objects)
                ),
                timeout=60,
            )
            services = [name for kind, name in self.objects if kind == "services"]
        hosts = [pod.name]
        if is_driver:
            hosts += [f"{service}.{NAMESPACE}.svc" for service in services]
        with self._root.path("/etc/hosts").open("a") as file:
            file.write(f"{pod.address} {' '.join(hosts)}\n")

    def _mounts(self, pod: Pod) -> Iterator[tuple[str, Path]]:
        """Yield the paths of a pod's volumes with the folders that appear there."""
        folders = {volume["name"]: self._volume(pod, volume) for volume in pod.spec["volumes"]}
        for mount in pod.container["volumeMounts"]:
            assert not mount.get("subPath"), mount
            yield mount["mountPath"], folders[mount["name"]]
        yield "/tmp", self._volume(pod, {"name": "tmp", "emptyDir": {}})

    def _volume(self, pod: Pod, volume: Object) -> Path:
        if "persistentVolumeClaim" in volume:
            return self._claims[volume["persistentVolumeClaim"]["claimName"]]
        folder = pod.folder / volume["name"]
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        if "configMap" in volume:
            data = self.objects["configmaps", volume["configMap"]["name"]]["data"]
            items = volume["configMap"].get("items") or [{"key": k, "path": k} for k in data]
            for item in items:
                (folder / item["path"]).write_text(data[item["key"]])
        else:
            assert "emptyDir" in volume, volume
        return folder


class Pod:
    """Pod: a process in a network namespace.

    Parameters
    ----------
    given : dict
        The object that Spark has created.
    number : int
        Last part of the pod's address.
    folder : Path
        Folder for volumes and output.
    """

    def __init__(self, given: Object, number: int, folder: Path) -> None:
        self.given, self.meta, self.spec = given, given["metadata"], given["spec"]
        self.name: str = self.meta["name"]
        (self.container,) = self.spec["containers"]
        self.address = f"{NETWORK}.{number}"
        self.namespace = f"{BRIDGE}{number}"
        self.folder = folder
        self.log = folder / "output.txt"
        self.ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._set_status("Pending", {"waiting": {}})
        folder.mkdir(parents=True)

    def open_network(self, policy: Object) -> None:
        """Create the network namespace with the pod's system settings and the policy."""
        inside = ("ip", "netns", "exec", self.namespace)
        link = f"{BRIDGE}v{self.namespace.removeprefix(BRIDGE)}"
        _run("ip", "netns", "add", self.namespace)
        _run(
            *("ip", "link", "add", link, "type", "veth"), *("peer", "eth0", "netns", self.namespace)
        )
        _run("ip", "link", "set", link, "master", BRIDGE, "up")
        for device, address in (("lo", "127.0.0.1/8"), ("eth0", f"{self.address}/24")):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run(*inside, "ip", "address", "add", address, "dev", device)
            _run(*inside, "ip", "link", "set", device, "up")
        for setting in self.spec["securityContext"].get("sysctls", []):
            _run(*inside, "sysctl", "-qw", f"{setting['name']}={setting['value']}")
        if policy["spec"]["podSelector"]["matchLabels"].items() <= self.meta["labels"].items():
            _run(*inside, "nft", "-f", "-", stdin=rules(policy))

    def start(self, command: list[str]) -> None:
        """Start the pod's process."""
        with self.log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        self._set_status("Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}})
        threading.Thread(target=self._await_end, daemon=True).start()

    def stop(self) -> None:
        """End the pod's process."""
        if self._process is not None:
            self._process.terminate()

    def remove(self) -> None:
        """End the process and delete the network namespace."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        subprocess.run(["ip", "netns", "delete", self.namespace], check=False)

    def rejected_packets(self) -> int:
        """Return the number of TCP packets that the policy has rejected, in both directions."""
        shown = _run("ip", "netns", "exec", self.namespace, "nft", "list", "ruleset")
        return sum(map(int, re.findall(r"counter packets (\d+)", shown)))

    def _await_end(self) -> None:
        assert self._process is not None
        self.end(self._process.wait())

    def end(self, status: int) -> None:
        """Set the pod's last status."""
        self._set_status("Failed" if status else "Succeeded", {"terminated": {"exitCode": status}})
        self.ended.set()

    def _set_status(self, phase: str, state: Object) -> None:
        running = phase == "Running"
        self.phase = phase
        self.given["status"] = {
            "phase": phase,
            "podIP": self.address,
            "startTime": "2026-01-01T00:00:00Z",
            "conditions": [{"type": "Ready", "status": str(running)}],
            "containerStatuses": [
                {"name": self.container["name"], "ready": running, "state": state}
            ],
        }


def rules(policy: Object) -> str:
    """Return a network policy as rules of nftables: what it does not open is dropped."""
    lines = ["table inet pods {"]
    for direction, hook, interface, peers, key in (
        ("ingress", "input", "iif", "saddr", "from"),
        ("egress", "output", "oif", "daddr", "to"),
    ):
        lines += [f"chain {hook} {{", f"type filter hook {hook} priority 0; policy drop;"]
        lines += [f"{interface} lo accept;"]
        lines += ["ct state established,related accept;"]
        for rule in policy["spec"][direction]:
            # The pods of a policy have all addresses but the API's.
            where = f"ip {peers} {NETWORK}.2-{NETWORK}.254 " if key in rule else ""
            for port in rule["ports"]:
                last = f"-{port['endPort']}" if "endPort" in port else ""
                lines += [f"{where}{port['protocol'].lower()} dport {port['port']}{last} accept;"]
        lines += ["meta l4proto tcp counter drop;", "}"]
    return "\n".join([*lines, "}"])


class _Handler(BaseHTTPRequestHandler):
    """Requests of Spark's client: objects are created, read, listed, changed and deleted."""

    kubernetes: Kubernetes
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        kind, _ = self._target()
        self._answer(self.kubernetes.create(kind, self._body()), 201)

    def do_PATCH(self) -> None:
        kind, name = self._target()
        known = self.kubernetes.objects.get((kind, name))
        body = self._body()
        self._answer(known or self.kubernetes.create(kind, body))

    def do_GET(self) -> None:
        kind, name = self._target()
        if "websocket" in self.headers.get("Upgrade", "").lower():
            self._answer({"kind": "Status", "code": 503}, 503)  # the client polls instead
        elif name:
            found = self.kubernetes.objects.get((kind, name))
            self._answer(found or {"kind": "Status", "code": 404}, 200 if found else 404)
        else:
            items = [self.kubernetes.objects[kind, name] for name in self._selected(kind)]
            self._answer({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items})

    def do_DELETE(self) -> None:
        kind, name = self._target()
        self._body()
        self.kubernetes.delete(kind, [name] if name else self._selected(kind))
        self._answer({"kind": "Status", "status": "Success"})

    def log_message(self, *arguments: object) -> None:
        """Write nothing."""

    def _target(self) -> tuple[str, str]:
        """Return kind and name in the path ``/api/v1/namespaces/NAMESPACE/KIND/NAME``."""
        parts = urlsplit(self.path).path.strip("/").split("/")[4:]
        return (parts[0] if parts else ""), (parts[1] if len(parts) > 1 else "")

    def _selected(self, kind: str) -> list[str]:
        """Return the names of a kind's objects with the requested labels."""
        query = parse_qs(urlsplit(self.path).query)
        terms = list(filter(None, query.get("labelSelector", [""])[0].split(",")))
        with self.kubernetes.changed:
            objects = list(self.kubernetes.objects.items())
        return [
            name
            for (its_kind, name), found in objects
            if its_kind == kind and all(_matches(found, term) for term in terms)
        ]

    def _body(self) -> Object:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return yaml.safe_load(body) if body else {}

    def _answer(self, content: Object, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _matches(found: Object, term: str) -> bool:
    """Return whether an object fits one term of a label selector."""
    labels = found["metadata"].get("labels") or {}
    if "!=" in term:
        key, _, value = term.partition("!=")
        return bool(labels.get(key) != value)
    key, has_value, value = term.partition("=")
    return key in labels and (not has_value or labels[key] == value)


def _run(*command: str, stdin: str | None = None) -> str:
    done = subprocess.run(command, input=stdin, check=True, capture_output=True, text=True)
    return done.stdout

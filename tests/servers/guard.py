"""Run a command while standard input is open.

A pipe closes even if its owner is killed, so that a server never outlives a killed test run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def end_with_owner() -> None:
        while os.read(0, 4096):
            pass
        server.kill()

    signal.signal(signal.SIGTERM, lambda *_: server.kill())
    threading.Thread(target=end_with_owner, daemon=True).start()
    return server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

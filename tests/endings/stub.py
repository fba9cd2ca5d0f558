"""What torchrun starts in place of a rank: has the nursery fork the rank, and ends as it ends.

Without torch, so that it starts at once. What torchrun does to a rank happens to the forked one:
SIGTERM reaches its process group, and where this process is killed, it is killed too.
"""

import contextlib
import json
import os
import signal
import socket
import sys

asking = socket.socket(socket.AF_UNIX)
asking.connect(os.environ["NURSERY"])
rank = os.environ["RANK"]
errors = f"{os.environ['RUN_DIR']}/stderr-{rank}"
job = {
    "id": rank,
    "module": sys.argv[1],
    "scenario": sys.argv[2],
    "environment": {**os.environ, "STDERR": errors},
}
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
asking.sendall((json.dumps(job) + "\n").encode())
answers = asking.makefile("rb")
pid = json.loads(answers.readline())["pid"]


def pass_on(number, frame):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


signal.signal(signal.SIGTERM, pass_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
status = json.loads(answers.readline())["status"]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(f"{os.environ['RUN_DIR']}/code-{rank}", "w") as file:
    file.write(str(status))
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)

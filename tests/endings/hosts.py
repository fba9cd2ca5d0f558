"""Three hosts on one switch, as network namespaces; the link of one can be cut."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass

WORLD = 3


def _ip(*commands: str) -> None:
    for command in commands:
        done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
        if done.returncode != 0:
            raise OSError(f"ip {command}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Hosts:
    """Host number R has the address 10.77.0.1R on its interface e0.

    Attributes:
        prefix: Of the names of their namespaces; the number follows.
    """

    prefix: str

    @property
    def switch(self) -> str:
        return f"{self.prefix}switch"

    @property
    def environment(self) -> dict[str, str]:
        """What a rank needs to live on the host of its number."""
        return {"NETNS": self.prefix, "MASTER_ADDR": "10.77.0.10", "GLOO_SOCKET_IFNAME": "e0"}

    def cut(self, number: int) -> None:
        """Pull the cable of a host."""
        _ip(f"-n {self.switch} link set v{number} down")

    def _plug(self, number: int) -> None:
        host = f"{self.prefix}{number}"
        _ip(
            f"netns add {host}",
            f"link add v{number} netns {self.switch} type veth peer name e0 netns {host}",
            f"-n {self.switch} link set v{number} master bridge up",
            f"-n {host} addr add 10.77.0.1{number}/24 dev e0",
            f"-n {host} link set e0 up",
            f"-n {host} link set lo up",
        )

    def make(self) -> None:
        """Raises OSError where that cannot be done."""
        _ip(
            f"netns add {self.switch}",
            f"-n {self.switch} link add bridge type bridge",
            f"-n {self.switch} link set bridge up",
        )
        for number in range(WORLD):
            self._plug(number)

    def remove(self) -> None:
        for name in (*(f"{self.prefix}{n}" for n in range(WORLD)), self.switch):
            with contextlib.suppress(OSError):
                _ip(f"netns del {name}")

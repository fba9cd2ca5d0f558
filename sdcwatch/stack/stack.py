"""The local stack: Prometheus, Alertmanager, a visible receiver, and Grafana where there is one.

Everything listens on loopback. Started in the order in which an alert flows back: receiver,
Alertmanager, Prometheus, Grafana; stopped in the reverse.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from sdcwatch.errors import ConfigurationError
from sdcwatch.stack.config import (
    Scrape,
    alertmanager_config,
    datasource_config,
    prometheus_config,
    read_yaml,
    with_short_waits,
    write_grafana,
    write_yaml,
)
from sdcwatch.stack.receiver import Receiver
from sdcwatch.stack.runbook import write_runbook
from sdcwatch.stack.servers import (
    LOOPBACK,
    Interrupted,
    Server,
    ServerSpec,
    choose_port,
    find_binary,
)

ALERTMANAGER_NAMES = ("alertmanager", "prometheus-alertmanager")
GRAFANA_NAMES = ("grafana", "grafana-server")
GRAFANA_HOMES = (Path("/usr/share/grafana"), Path("/usr/local/share/grafana"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """The servers found on this machine.

    Attributes:
        prometheus: Prometheus.
        alertmanager: Alertmanager.
        grafana: Grafana, or None.
        grafana_home: Its home directory, or None.
    """

    prometheus: Path
    alertmanager: Path
    grafana: Path | None
    grafana_home: Path | None

    @classmethod
    def find(cls) -> Binaries:
        """Look on the PATH.

        Raises:
            ConfigurationError: There is no Prometheus or no Alertmanager.
        """
        grafana = next((Path(p) for name in GRAFANA_NAMES if (p := shutil.which(name))), None)
        return cls(
            prometheus=find_binary("Prometheus", ("prometheus",), "prometheus"),
            alertmanager=find_binary("Alertmanager", ALERTMANAGER_NAMES, "prometheus-alertmanager"),
            grafana=grafana,
            grafana_home=_grafana_home(grafana) if grafana else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Ports on loopback; 0 stands for any free one until `chosen`."""

    prometheus: int
    alertmanager: int
    receiver: int
    grafana: int

    def chosen(self, *, grafana: bool) -> Ports:
        """The same with free ports in place of 0.

        Args:
            grafana: Whether Grafana will be started; its port does not matter otherwise.

        Raises:
            ConfigurationError: Something listens on one of them already.
        """
        names = ("prometheus", "alertmanager", "receiver", *(("grafana",) if grafana else ()))
        taken = {n: choose_port(n.capitalize(), getattr(self, n), f"--{n}-port") for n in names}
        return replace(self, **taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """What the local stack runs with.

    Attributes:
        binaries: What to start.
        ports: Where the servers listen.
        data_dir: Where configuration, data and logs go.
        scrape: What Prometheus scrapes.
        rules: Prometheus rule files.
        alertmanager: Alertmanager configuration whose route and inhibition are used.
        dashboards: Directory of dashboards for Grafana; None where there are none.
        runbook: The runbook in Markdown, served by Prometheus as a page; None where there is none.
        datasource: UID of the data source that the dashboards preselect.
        short_waits: Whether Alertmanager groups for seconds instead of the times it is given.
        start_seconds: How long a server may take to become healthy.
    """

    binaries: Binaries
    ports: Ports
    data_dir: Path
    scrape: Scrape
    rules: tuple[Path, ...]
    alertmanager: Path
    dashboards: Path | None
    runbook: Path | None
    datasource: str
    short_waits: bool = False
    start_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Check that what it names is there."""
        for path in (*self.rules, self.alertmanager):
            if not path.is_file():
                msg = f"Expected a file at {path}, but got none. Pass another path."
                raise ConfigurationError(msg)
        if self.dashboards is not None and not self.dashboards.is_dir():
            msg = f"Expected a directory at {self.dashboards}, but got none. Pass another path."
            raise ConfigurationError(msg)


@dataclass(frozen=True, slots=True)
class Place:
    """One row of "where everything is"."""

    what: str
    where: str
    shows: str


class LocalStack:
    """The running stack; a context manager that leaves no process behind.

    Args:
        config: What to run.
        write: Called with a block of text per alert that the receiver gets.
        stopping: Asked while servers start; True gives up.

    Attributes:
        places: Where everything is.
        notes: What could not be started, and why.
    """

    def __init__(
        self,
        config: StackConfig,
        *,
        write: Callable[[str], None],
        stopping: Callable[[], bool],
    ) -> None:
        self._config = replace(config, data_dir=config.data_dir.resolve())
        self._write, self._stopping = write, stopping
        self._servers: list[Server] = []
        self._cleanup = ExitStack()
        self.places: list[Place] = []
        self.notes: list[str] = []

    def __enter__(self) -> LocalStack:
        """Start everything.

        Raises:
            ConfigurationError: A file cannot be read, or the receiver's port was just taken.
            ServerFailed: A server did not become healthy.
            Interrupted: `stopping` said so.
        """
        with ExitStack() as self._cleanup:
            self._start_receiver()
            self._start_alertmanager()
            self._start_prometheus()
            self._start_grafana()
            self._write_state()
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop everything."""
        self._cleanup.close()

    def check_alive(self) -> None:
        """Return if every server still runs.

        Raises:
            ServerFailed: One has ended by itself.
        """
        for server in self._servers:
            server.check_alive()

    def _start(
        self, title: str, port: int, health: str, command: tuple[str, ...], shows: str
    ) -> None:
        if self._stopping():
            raise Interrupted
        log = self._config.data_dir / f"{title.lower()}.log"
        url = f"http://{LOOPBACK}:{port}"
        server = Server(ServerSpec(title=title, command=command, url=url, health=health, log=log))
        self._cleanup.callback(server.stop)
        server.wait_healthy(self._config.start_seconds, self._stopping)
        self._servers.append(server)
        self.places.append(Place(title, url, shows))
        self.places.append(Place(f"{title} log", str(log), "its output"))

    def _start_receiver(self) -> None:
        log = self._config.data_dir / "notifications.jsonl"
        try:
            receiver = Receiver(LOOPBACK, self._config.ports.receiver, write=self._write, log=log)
        except OSError as error:
            msg = (
                f"Expected port {self._config.ports.receiver} to be free for the receiver, "
                f"but got: {error}. Pass --receiver-port 0 for any free port."
            )
            raise ConfigurationError(msg) from error
        receiver.start()
        self._cleanup.callback(receiver.close)
        self.places.append(Place("Receiver", receiver.url, "alerts that were sent, newest first"))
        self.places.append(Place("Receiver log", str(log), "each notification as JSON"))

    def _start_alertmanager(self) -> None:
        config, port = self._config, self._config.ports.alertmanager
        directory = config.data_dir / "alertmanager"
        webhook = f"http://{LOOPBACK}:{config.ports.receiver}"
        content = alertmanager_config(read_yaml(config.alertmanager), webhook)
        if config.short_waits:
            content = with_short_waits(content)
        path = write_yaml(directory / "alertmanager.yml", content)
        command = (
            str(config.binaries.alertmanager),
            f"--config.file={path}",
            f"--storage.path={directory / 'data'}",
            f"--web.listen-address={LOOPBACK}:{port}",
            f"--web.external-url=http://{LOOPBACK}:{port}",
            "--cluster.listen-address=",  # one instance: no gossip, and so no port off loopback
        )
        self._start("Alertmanager", port, "/-/ready", command, "routing, grouping, silences")

    def _start_prometheus(self) -> None:
        config, port = self._config, self._config.ports.prometheus
        directory = config.data_dir / "prometheus"
        for watched in config.scrape.file_sd:
            watched.mkdir(parents=True, exist_ok=True)
        target = f"{LOOPBACK}:{config.ports.alertmanager}"
        content = prometheus_config(config.scrape, config.rules, target)
        path = write_yaml(directory / "prometheus.yml", content)
        command = (
            str(config.binaries.prometheus),
            f"--config.file={path}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={LOOPBACK}:{port}",
            f"--web.external-url=http://{LOOPBACK}:{port}",
            f"--web.user-assets={directory / 'user'}",
            # What fires before Prometheus has found Alertmanager is lost until it is sent again.
            "--rules.alert.resend-delay=10s",
        )
        self._start("Prometheus", port, "/-/ready", command, "targets, rules, queries")
        if config.runbook is None:
            self.notes.append("Runbook: none came with this installation; pass --runbook.")
        else:
            page = write_runbook(config.runbook, directory / "user")
            url = f"http://{LOOPBACK}:{port}/user/{page.name}"
            self.places.append(Place("Runbook", url, "what each alert means and what to do"))

    def _start_grafana(self) -> None:
        config, binary = self._config, self._config.binaries.grafana
        if binary is None:
            self.notes.append("Grafana: no `grafana` or `grafana-server` on the PATH; not started.")
        elif config.binaries.grafana_home is None:
            self.notes.append(
                f"Grafana: {binary} is there, but neither it nor /usr/share/grafana has a home "
                "directory with conf/defaults.ini; not started."
            )
        elif config.dashboards is not None:
            prometheus = f"http://{LOOPBACK}:{config.ports.prometheus}"
            interval = config.scrape.interval_seconds
            source = datasource_config(config.datasource, prometheus, interval)
            directory = config.data_dir / "grafana"
            files = write_grafana(directory, config.ports.grafana, source, config.dashboards)
            command = (
                str(binary),
                *(("server",) if binary.name == "grafana" else ()),
                f"--homepath={config.binaries.grafana_home}",
                f"--config={files.ini}",
            )
            shows = "dashboards; anyone on this machine may look"
            self._start("Grafana", config.ports.grafana, "/api/health", command, shows)
            self.places.append(Place("Grafana password", str(files.password), "of user admin"))
            return
        if config.dashboards is not None:
            self.notes.append(f"Import the dashboards of {config.dashboards.resolve()} into yours.")

    def _write_state(self) -> None:
        state: dict[str, Any] = {
            "pid": os.getpid(),
            "servers": {s.spec.title: {"url": s.spec.url, "pid": s.pid} for s in self._servers},
            "places": {place.what: place.where for place in self.places},
        }
        path = self._config.data_dir / "stack.json"
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        self._cleanup.callback(path.unlink, missing_ok=True)
        draft.replace(path)


def _grafana_home(binary: Path) -> Path | None:
    beside = binary.resolve().parent.parent
    homes = (beside, beside / "share" / "grafana", *GRAFANA_HOMES)
    return next((home for home in homes if (home / "conf" / "defaults.ini").is_file()), None)


def locked(data_dir: Path) -> IO[str]:
    """The lock of `data_dir`, held until it is closed; the kernel frees it if this process dies.

    Raises:
        ConfigurationError: Another stack holds it.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    lock = (data_dir / "lock").open("a", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        msg = (
            f"Expected {data_dir} to be used by no other stack, but got one that runs. "
            "Stop it, or pass another --data-dir."
        )
        raise ConfigurationError(msg) from None
    return lock

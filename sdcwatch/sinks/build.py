"""Puts the sinks of one rank together, and says in one sentence each where records go.

Nothing in here may stop a run: a sink that cannot be made becomes a sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sdcwatch.sinks.base import SCRAPE_SECONDS
from sdcwatch.sinks.dispatch import Dispatcher
from sdcwatch.sinks.jsonl import EVENTS, JsonlSink, RunSoFar
from sdcwatch.sinks.wandb import active_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sdcwatch.config import Export, LauncherEnvironment, TelemetryConfig
    from sdcwatch.core.records import RunStarted
    from sdcwatch.core.topology import RankInfo
    from sdcwatch.sinks.base import Sink
    from sdcwatch.sinks.otel import Identity, OtelSink

OWN_KINDS = ("hang",)
"""What a rank other than the leader logs itself; everything else is agreed on by all ranks."""


def build_sinks(  # noqa: PLR0913  the seam between guard and sinks: everything by name
    telemetry: TelemetryConfig | Literal["off"],
    start: RunStarted,
    *,
    rank: int,
    local_rank: int,
    environment: LauncherEnvironment,
    run_dir: Path,
    extra: Sequence[Sink] = (),
) -> tuple[Dispatcher, tuple[str, ...]]:
    """The sinks of one rank behind a dispatcher, and where they write.

    Args:
        telemetry: Where records go; "off" for the event log alone.
        start: The start record, for run, ranks and links. It is not emitted here.
        rank: Rank of this process.
        local_rank: Its rank within the machine.
        environment: What the launcher says.
        run_dir: Directory of the event log.
        extra: Further sinks, served like the others.
    """
    leader = min(info.rank for info in start.ranks)
    log = _event_log(run_dir, rank, leader)
    lines = [f"Events are written to {log.path}."] if rank == leader else []
    exports = telemetry != "off" and rank in exporting_ranks(start.ranks, telemetry.export)
    # Others have nobody to tell about earlier segments, and may not see the leader's directory.
    so_far = RunSoFar(run_dir if rank == leader or exports else None)
    if so_far.problem and rank == leader:
        lines.append(f"Warning: {so_far.problem}.")
    if telemetry == "off":
        return Dispatcher(extra, direct=[log], run=so_far), tuple(lines)
    builder = _Builder(telemetry, start, rank, local_rank, environment)
    if rank == leader:
        builder.attempt("W&B", lambda: builder.add_wandb(run_dir))
    if exports:
        builder.attempt("OpenTelemetry", builder.add_otel)
        if rank == leader and telemetry.logs:
            builder.attempt("OpenTelemetry logs", builder.add_logs)
    dispatcher = Dispatcher(
        [*builder.sinks, *extra],
        queue_size=telemetry.queue_size,
        close_seconds=telemetry.close_seconds,
        direct=[log],
        linger_seconds=telemetry.linger_seconds + SCRAPE_SECONDS,
        run=so_far,
    )
    if builder.otel is not None:
        builder.otel.watch(lambda: dispatcher.counts)
    return dispatcher, (*lines, *builder.lines)


def _event_log(run_dir: Path, rank: int, leader: int) -> JsonlSink:
    if rank == leader:
        return JsonlSink(run_dir / EVENTS)
    return JsonlSink(run_dir / f"events-rank{rank}.jsonl", kinds=OWN_KINDS)


def exporting_ranks(ranks: Sequence[RankInfo], export: Export) -> tuple[int, ...]:
    """The ranks that export metrics.

    Args:
        ranks: Identity of each rank.
        export: "leader": the lowest rank; "node": the lowest rank of each node; "all".
    """
    ordered = sorted(ranks, key=lambda info: info.rank)
    if export == "all":
        return tuple(info.rank for info in ordered)
    if export == "node":
        first: dict[str, int] = {}
        for info in ordered:
            first.setdefault(info.node, info.rank)
        return tuple(sorted(first.values()))
    return tuple(info.rank for info in ordered[:1])


class _Builder:
    """Collects the sinks of one rank."""

    def __init__(
        self,
        telemetry: TelemetryConfig,
        start: RunStarted,
        rank: int,
        local_rank: int,
        environment: LauncherEnvironment,
    ) -> None:
        self.sinks: list[Sink] = []
        self.lines: list[str] = []
        self.otel: OtelSink | None = None
        self._telemetry = telemetry
        self._start = start
        self._rank = rank
        self._local_rank = local_rank
        self._environment = environment
        self._links = dict(start.links)
        if telemetry.dashboard_url:
            self._links["dashboard"] = telemetry.dashboard_url

    def attempt(self, what: str, add: Callable[[], None]) -> None:
        """Add a sink; a failure becomes a line. Its text is left out: it may quote a secret."""
        try:
            add()
        except ImportError as error:
            self.lines.append(f"Warning: no {what}. {error}")
        except Exception as error:
            self.lines.append(f"Warning: no {what}, it failed to start ({type(error).__name__}).")

    def add_wandb(self, run_dir: Path) -> None:
        """Events and summary in the run the script has, or in one we were asked to make."""
        telemetry = self._telemetry
        run = active_run() if telemetry.wandb else None
        if run is None and telemetry.wandb_init is None:
            return
        from sdcwatch.sinks.wandb import WandbSink

        sink = (
            WandbSink(run, links=self._links, report=run_dir / "report.html")
            if run is not None
            else WandbSink.created(
                telemetry.wandb_init or {},
                close_seconds=telemetry.close_seconds,
                links=self._links,
                report=run_dir / "report.html",
            )
        )
        self._links.update(sink.links)
        self.sinks.append(sink)
        self.lines.extend(sink.lines)

    def add_otel(self) -> None:
        """Metrics: through the application's provider, or through one of our own."""
        from sdcwatch.sinks.otel import OtelSink
        from sdcwatch.sinks.otel_internals import application_provider

        if self._environment.otel_disabled:
            self.lines.append("OTEL_SDK_DISABLED is true: no metrics.")
            return
        telemetry, identity = self._telemetry, self._identity()
        provider = application_provider()
        if provider is not None:
            sink = OtelSink.of_application(provider, identity, self._links)
        elif telemetry.prometheus or self._push:
            sink = OtelSink.standalone(
                identity,
                listen=self._listen(),
                file_sd_dir=telemetry.file_sd_dir,
                otlp=self._push,
                linger_seconds=telemetry.linger_seconds,
                links=self._links,
            )
        else:
            return
        self.otel = sink
        self.sinks.append(sink)
        self.lines.extend(sink.lines)

    def add_logs(self) -> None:
        """Log records: through the application's provider, or pushed next to the metrics."""
        from sdcwatch.sinks.otel_internals import application_logger_provider
        from sdcwatch.sinks.otel_logs import OtelLogSink

        if self._environment.otel_disabled:
            return
        identity = self._identity()
        provider = application_logger_provider()
        if provider is not None:
            sink = OtelLogSink(provider, identity.labels, identity.version)
        elif self._push_logs:
            sink = OtelLogSink.over_otlp(identity.resource(), identity.labels, identity.version)
        else:
            return
        self.sinks.append(sink)
        self.lines.extend(sink.lines)

    @property
    def _push(self) -> bool:
        otlp = self._telemetry.otlp
        return self._environment.otlp_endpoint if otlp is None else otlp

    @property
    def _push_logs(self) -> bool:
        # A collector named for metrics alone need not take log records.
        otlp = self._telemetry.otlp
        return self._environment.otlp_logs_endpoint if otlp is None else otlp

    def _identity(self) -> Identity:
        from sdcwatch.sinks.otel import Identity

        node = next((i.node for i in self._start.ranks if i.rank == self._rank), "")
        return Identity(
            run=self._start.run,
            rank=self._rank,
            attempt=self._environment.restart_count,
            node=node,
            version=self._start.version,
            run_id=self._start.run_id,
        )

    def _listen(self) -> tuple[str, int] | None:
        if not self._telemetry.prometheus:
            return None
        port = self._telemetry.prometheus_port
        return self._telemetry.prometheus_host, (port + self._local_rank if port else 0)

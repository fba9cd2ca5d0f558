"""Scrapes of synthetic runs: records through the product's own measuring, as OpenMetrics text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from sdcwatch.core.catalog import CATALOG
from sdcwatch.core.outcomes import MEANINGS
from sdcwatch.core.records import (
    Cause,
    Check,
    Count,
    Coverage,
    Outcome,
    PreflightDone,
    Progress,
    Record,
    RunStarted,
    RunWord,
    Suspect,
    Verdict,
)
from sdcwatch.core.summary import SummaryBuilder
from sdcwatch.core.topology import RankInfo
from sdcwatch.sinks.metrics import RecordMetrics

_Key: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@dataclass
class Process:
    """One exporting process of a run.

    Attributes:
        run: Name of the run.
        instance: The target that Prometheus scrapes.
        job: Its job.
        summary: What the run has come to; of earlier processes too, where they are given.
    """

    run: str
    instance: str = "host-0:9464"
    job: str = "train"
    summary: SummaryBuilder = field(default_factory=SummaryBuilder)
    metrics: RecordMetrics = field(default_factory=RecordMetrics)
    _values: dict[_Key, float] = field(default_factory=dict)

    @property
    def word(self) -> RunWord:
        """The run's word, as core computes it."""
        return self.summary.summary().verdict

    def take(self, record: Record) -> None:
        """Measure one record."""
        self.summary.add(record)
        summary = self.summary.summary()
        for measured in self.metrics.measure(record, summary):
            metric = measured.metric
            if metric.kind == "histogram":
                continue
            key = (metric.prometheus, tuple(sorted(measured.attributes.items())))
            counter = metric.kind == "counter"
            self._values[key] = measured.value + (self._values.get(key, 0.0) if counter else 0.0)
        infos = [m for series in self.metrics.infos(summary).values() for m in series]
        told = {m.prometheus for m in CATALOG if m.info}  # those that no longer hold are gone
        self._values = {k: v for k, v in self._values.items() if k[0] not in told}
        for measured in infos:
            key = (measured.metric.prometheus, tuple(sorted(measured.attributes.items())))
            self._values[key] = measured.value

    def scrape(self, now: float, only: tuple[str, ...] = ()) -> Iterator[str]:
        """One line per series; with `only`, of these outcomes, and when a process lived."""
        target = {
            "run": self.run,
            "exporter_rank": "0",
            "job": self.job,
            "instance": self.instance,
        }
        for (name, attributes), value in self._values.items():
            if only and not _wanted(name, dict(attributes), only):
                continue
            labels = {**dict(attributes), **target}
            text = ",".join(f'{k}="{_escaped(v)}"' for k, v in labels.items())
            yield f"{name}{{{text}}} {value} {now:.3f}"


def _wanted(name: str, labels: dict[str, str], outcomes: tuple[str, ...]) -> bool:
    if name == "sdcwatch_verdicts_total":
        return labels["check"] == "replay" and labels["outcome"] in outcomes
    return name in ("sdcwatch_guard_state", "sdcwatch_start_time_seconds")


def scrapes(
    process: Process,
    records: Iterable[Record],
    span: tuple[float, float],
    every: float,
    only: tuple[str, ...] = (),
) -> list[str]:
    """What Prometheus scrapes from a process that emits records and lives from start to end."""
    pending = sorted(records, key=lambda r: r.time)
    lines: list[str] = []
    at, end = span
    while at <= end:
        while pending and pending[0].time <= at:
            process.take(pending.pop(0))
        lines += process.scrape(at, only)
        at += every
    return lines


def in_order(lines: list[str]) -> list[str]:
    """Lines with equal families together, as OpenMetrics wants them; samples by time."""
    return sorted(lines, key=lambda line: (line.split("{")[0], float(line.rpartition(" ")[2])))


END = 1_795_000_000.0
"""Unix time at which the synthetic runs end; before the recorded ones."""

HOSTILE_NAMES = (
    "lr=1e+4",
    "gpt (seed 1)",
    "a|b",
    'exp "A" (v1.2)+ü/β',
    "exp.1",
    "exp-1",
    "100% & more",
    "back\\slash",
    "$run ${run} {{run}}",
    "[x]*? ^#,=~'<b>",
)


def started(run: str, at: float, *, step: int = 0) -> RunStarted:
    """The start record of a run on three nodes."""
    ranks = tuple(
        RankInfo(
            rank=r, node=f"n{r}", host=f"n{r}", local_rank=0, pid=1, instance_id=f"i-{r}",
            gpu_uuid=f"GPU-{r}",
        )
        for r in range(3)
    )  # fmt: skip
    return RunStarted(
        step=step, time=at, run=run, version="1", ranks=ranks, fault_domain="node", mode="enforce",
        on_failure="skip", audit_every=20, fingerprint_every=5, checkpoint_every=20,
        max_audit_age=40, quorum=2, parameters=1, parameter_bytes=4, run_id=f"id of {run}",
        run_dir=f"/runs/{run}",
    )  # fmt: skip


def verdict(at: float, outcome: Outcome, check: Check = Check.REPLAY, *, step: int = 40,
            cause: Cause = Cause.NONE, rank: int = 1) -> Verdict:  # fmt: skip
    """A verdict; of rank 1 on GPU-1 if it names anybody."""
    suspect = Suspect(
        rank=rank, node=f"n{rank}", instance_id=f"i-{rank}", gpu=f"GPU-{rank}", gpu_index=0,
        check=check,
        mismatches=2, comparisons=2,
    )  # fmt: skip
    who = (Outcome.SUSPECT, Outcome.NOT_REPRODUCED)
    meant = MEANINGS[outcome]
    return Verdict(
        step=step, time=at, check=check, outcome=outcome, reason="a sentence", cause=cause,
        suspects=(suspect,) if outcome in who else (), failed=meant.failed,
    )  # fmt: skip


def clean_audit(at: float, step: int = 20) -> Progress:
    """A window with one clean audit."""
    passed = (Count(check=Check.REPLAY, outcome=Outcome.PASS, count=1),)
    return Progress(
        step=step, time=at, first_step=step, plain_steps=1, audit_steps=1, counts=passed,
        comparisons=3, last_clean_audit_step=step, last_clean_audit_time=at,
    )  # fmt: skip


def preflight(at: float, coverage: Coverage = Coverage.FULL) -> PreflightDone:
    """The record after preflight."""
    return PreflightDone(
        step=0, time=at, coverage=coverage, reason="equal", deterministic_kernels=False, repeats=4
    )


def _trials() -> dict[str, tuple[Callable[[float], Record], ...]]:
    """Sequences of what happens to a run, each from some time on."""
    return {
        "nothing yet": (),
        "clean": (clean_audit,),
        "outputs only": (lambda t: preflight(t, Coverage.OUTPUTS_ONLY), clean_audit),
        "suspect then clean": (lambda t: verdict(t, Outcome.SUSPECT), clean_audit),
        "nondeterministic then clean": (
            lambda t: verdict(t, Outcome.NONDETERMINISTIC),
            clean_audit,
        ),
        "transport": (clean_audit, lambda t: verdict(t, Outcome.TRANSPORT)),
        "unattributed": (clean_audit, lambda t: verdict(t, Outcome.UNATTRIBUTED)),
        "differs": (clean_audit, lambda t: verdict(t, Outcome.DIFFERS)),
        "one-off": (clean_audit, lambda t: verdict(t, Outcome.NOT_REPRODUCED)),
        "tainted": (clean_audit, lambda t: verdict(t, Outcome.SUSPECT, Check.FINGERPRINT)),
        "software": (
            clean_audit,
            lambda t: verdict(t, Outcome.UNATTRIBUTED, Check.FINGERPRINT, cause=Cause.SOFTWARE),
        ),
    }


TRIALS = _trials()
"""Names of runs, and what happens to them."""


def trial(name: str, until: float = END) -> Process:
    """A run to which the trial of this name happens, ten seconds apart."""
    process = Process(name)
    at = until - 600
    process.take(started(name, at))
    process.take(preflight(at + 1))
    for index, make in enumerate(TRIALS[name]):
        process.take(make(at + 10 * (index + 1)))
    return process


def hostile(name: str) -> list[str]:
    """Ten minutes of a run with this name, in which a device is named."""
    start = END - 600
    records = (
        started(name, start),
        preflight(start + 1),
        clean_audit(start + 30),
        verdict(start + 200, Outcome.SUSPECT),
    )
    process = Process(name, instance=f"h{HOSTILE_NAMES.index(name)}:1")
    return scrapes(process, records, (start, END), 30)


@dataclass(frozen=True)
class Logged:
    """A run whose events are known, scraped at some interval.

    Attributes:
        every: Seconds between scrapes.
        seconds: Length of the range.
        points: Width of the panel in points, which decides the length of a bar.
    """

    every: int
    seconds: int
    points: int

    @property
    def run(self) -> str:
        """Its name."""
        return f"log {self.every}s {self.seconds}s"

    @property
    def interval(self) -> int:
        """Seconds of one bar, as Grafana rounds them: never below the data source's interval."""
        return max(self.every, -(-self.seconds // self.points))

    def events(self) -> dict[str, list[float]]:
        """Times of findings by outcome: two close together, one near the end of a process."""
        start, length = END - self.seconds, self.seconds
        shares = {
            "suspect": (0.31, 0.85),
            "transport": (0.3, 0.301, 0.72, 0.8),
            "inconclusive": (0.12, 0.35, 0.46),
        }
        return {o: [start + share * length for share in s] for o, s in shares.items()}

    def lines(self) -> list[str]:
        """Scrapes of two processes of the run, the second one elsewhere."""
        start, half = END - self.seconds + 60, END - self.seconds / 2
        events = sorted((t, o) for o, times in self.events().items() for t in times)
        lines: list[str] = []
        for host, begin, end in (("a:1", start, half), ("b:1", half + 3 * self.every, END)):
            records = [started(self.run, begin)]
            records += [verdict(t, Outcome(o)) for t, o in events if begin < t <= end]
            process = Process(self.run, instance=host)
            lines += scrapes(process, records, (begin, end), self.every, tuple(self.events()))
        return lines


LOGGED = (
    *(Logged(every, seconds, 300) for every in (5, 15, 60) for seconds in (900, 21_600)),
    Logged(60, 604_800, 1000),
)


def everything() -> list[str]:
    """All synthetic runs."""
    lines: list[str] = []
    for name in TRIALS:
        process = trial(name)
        lines += [*process.scrape(END - 30), *process.scrape(END)]
    for name in HOSTILE_NAMES:
        lines += hostile(name)
    for logged in LOGGED:
        lines += logged.lines()
    return in_order(lines)

"""What the guard does at 64 to 16,384 ranks: messages, bytes, store requests, seconds, memory.

    python benchmarks/scale.py [--worlds 64 1024 16384] [--markdown]

One rank runs the real code (topology, pairing, schedule, judgement, records, event log, the weight
check and the non-finite check) against an exchange in memory in which all other ranks are made up:
what they would send is a function of what this one sends. Every collective is counted with the
bytes that a rank holds at once because of it. Meeting is run by 64 live ranks, the others having
arrived, and a liveness check by every rank, through a store in memory that counts the requests of
each. Where all ranks plan alike, one rank's time is everybody's; seconds are CPU time. What gloo
asks of the store is counted on a group of eight real ones. The last line says whether the limits
hold; the exit code is 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sdcwatch.core.arbitration import Mismatch, plan_arbitration, plan_repeats, settle
from sdcwatch.core.checkpoint import audit_due, fingerprint_due
from sdcwatch.core.history import History
from sdcwatch.core.nonfinite import RankFinite
from sdcwatch.core.records import Record, encode
from sdcwatch.core.replay import AuditFacts, judge_audit, remember
from sdcwatch.core.summary import SummaryBuilder
from sdcwatch.core.topology import RankInfo, Topology, candidate_pairings, draw_pairing, partners
from sdcwatch.core.waiting import Stage, describe, judge_wait
from sdcwatch.guard.arrivals import ARRIVED, Arrivals
from sdcwatch.guard.bitmap import mark
from sdcwatch.guard.fingerprint import (
    ReplicaSet,
    WeightCheck,
    pack_fingerprints,
    unpack_fingerprints,
)
from sdcwatch.guard.group import lazy_group
from sdcwatch.guard.nonfinite import NonfiniteInvestigation
from sdcwatch.guard.replay import AuditResult
from sdcwatch.guard.reporter import VerdictBuilder
from sdcwatch.guard.watchdog import LivenessCheck
from sdcwatch.sinks.jsonl import EVENTS, JsonlSink, stream_records

GPUS_A_NODE = 8
TENSORS = 400
MESSAGE_LIMIT = 16 * 2**20
PURE_LIMIT_SECONDS = 1.0
MEMORY_LIMIT_MB = 200.0
INIT_REQUESTS = 60
LIVENESS_REQUESTS = 20
LIVE = 64
"""Ranks that live in full where all do the same."""
NOT_ONE_RANK = ("answers, of all ranks",)
"""Work of all ranks, one after the other."""
STEP = 4000


@dataclass
class Ledger:
    """What one scenario came to on one rank."""

    collectives: int = 0
    sent: int = 0
    held: int = 0
    """Bytes of the largest single collective, as held by one rank."""
    parts: dict[str, float] = field(default_factory=dict)
    requests: int = 0
    """Store requests of the rank that made most, the elected one apart."""
    elected: int = 0
    """Those of the rank that asks and reads for all, in a liveness check."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.thread_time()  # CPU time: neighbours on a shared machine do not count
        yield
        took = time.thread_time() - began
        self.parts[name] = max(took, self.parts.get(name, 0.0))


Answer = Callable[[int, bytes], bytes]
Largest = Callable[[Sequence[int]], Sequence[int]]


class MadeUpPeers:
    """An `Exchange` of one live rank: the others answer by rule, and every message is counted."""

    def __init__(
        self,
        world_size: int,
        ledger: Ledger,
        *,
        largest: Largest = list,
        answer: Answer | None = None,
    ) -> None:
        self.rank, self.world_size = 0, world_size
        self._ledger, self._largest = ledger, largest
        self._answer = answer or (lambda _, message: message)

    def max_int64s(self, words: Sequence[int], operation: str, **_: Any) -> tuple[int, ...]:
        self._count(8 * len(words), 8 * len(words))
        both = zip(words, self._largest(words), strict=True)
        return tuple(max(own, other) for own, other in both)

    def gather(self, message: bytes, operation: str, **_: Any) -> list[bytes]:
        peers = (self._answer(rank, message) for rank in range(1, self.world_size))
        rows = [message, *peers]
        longest = max(map(len, rows))
        self._count(8, 8 * self.world_size)
        self._count(longest, longest * self.world_size)
        return rows

    def route(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Sequence[int], operation: str
    ) -> dict[int, torch.Tensor]:
        for tensor in outgoing.values():
            self._count(tensor.numel(), tensor.numel())
        return {rank: torch.zeros(4 * 4, dtype=torch.uint8) for rank in incoming}

    def _count(self, sent: int, held: int) -> None:
        ledger = self._ledger
        ledger.collectives += 1
        ledger.sent += sent
        ledger.held = max(ledger.held, held)


def topology_of(world: int) -> Topology:
    """Nodes of eight GPUs."""
    return Topology(
        tuple(
            RankInfo(
                rank=r, node=f"node-{r // GPUS_A_NODE:05d}", host=f"host-{r // GPUS_A_NODE:05d}",
                local_rank=r % GPUS_A_NODE, pid=r, instance_id=f"i-{r // GPUS_A_NODE:017x}",
                gpu_index=r % GPUS_A_NODE, gpu_uuid=f"GPU-{r:032x}",
            )
            for r in range(world)
        )
    )  # fmt: skip


class Scenarios:
    """Every situation, at one number of ranks."""

    def __init__(self, world: int, run_dir: Path) -> None:
        self.world, self.run_dir = world, run_dir
        self.topology = topology_of(world)
        self.log = JsonlSink(run_dir / EVENTS)
        self.summary = SummaryBuilder()
        self.verdicts = VerdictBuilder(self.topology, observing=False)

    def _written(self, ledger: Ledger, record: Record) -> None:
        """Through the event log and into the summary, as a reporter does."""
        with ledger.timed("record, event log, summary"):
            self.log.emit(record)
            self.summary.add(record)
            json.dumps(self.summary.summary().to_dict())
        if len(encode(record)) > 2**20:
            msg = f"Expected a record of at most 1 MiB, but got {len(encode(record))} bytes."
            raise ValueError(msg)

    def start(self) -> Ledger:
        """Topology, the pairings of a run, and whom this rank will ever exchange with."""
        ledger = Ledger()
        ranks = self.topology.ranks
        with ledger.timed("topology"):
            topology = Topology(ranks)
        with ledger.timed("pairings"):
            candidate_pairings(topology)
        with ledger.timed("partners"):
            partners(topology, [0])
        message = json.dumps(asdict(topology.ranks[0])).encode()
        MadeUpPeers(self.world, ledger).gather(message, "sdcwatch.init")
        return ledger

    def meet(self, missing: int = 0) -> Ledger:
        """Arrive in the store, as `sdcwatch.init` does; the last ranks may never come."""
        ledger, store = Ledger(), MemoryStore()
        live = min(LIVE, self.world - missing)
        others = range(live, self.world - missing)
        for rank in others:
            mark(store, ARRIVED, rank)
        store.add("started", len(others))
        clients = [StoreClient(store) for _ in range(live)]
        missed: list[tuple[int, ...]] = []

        def arrive(rank: int) -> None:
            clients[rank].add("arrivals", 1)  # which generation of exchanges this is
            finding, _ = Arrivals(clients[rank], rank, self.world).meet(0.5 if missing else 60.0)
            if finding is not None:
                missed.append(finding.silent)

        run_together(arrive, range(live))
        never = tuple(range(self.world - missing, self.world))
        expect(str(missed), str([never] * live if missing else []))
        requests = sorted(client.requests for client in clients)
        ledger.requests, ledger.held = requests[-2 if missing else -1], store.largest
        ledger.elected = requests[-1]
        return ledger

    def lost(self, gone: Sequence[int], late: Sequence[int] = ()) -> Ledger:
        """All ranks wait at the end of a backward; some were killed, or are three steps behind."""
        ledger, store = Ledger(), MemoryStore()
        clients = [StoreClient(store) for _ in range(self.world)]
        operation = f"the end of the backward of step {STEP}"
        ranks = [LivenessCheck(c, r, self.world, 0.3) for r, c in enumerate(clients)]
        for check in ranks:
            if check.rank in late:
                check.move(STEP - 3, Stage.COMPUTING, f"in step {STEP - 3}")
            else:
                check.move(STEP, Stage.STEP, f"before {operation}")
                check.begin(operation)
        waiting = [c for c in ranks if c.rank not in (*gone, *late)]
        behind = [threading.Thread(target=c.answer_next, args=(c._store,)) for c in ranks
                  if c.rank in late]  # fmt: skip

        def answers() -> None:
            for thread in behind:
                thread.start()
            with ledger.timed("answers, of all ranks"):
                for check in waiting:
                    check.answer_next(check._store)

        store.asked = answers
        first, *others = waiting
        finding = first.call()
        found = [check.call() for check in others[:LIVE]]
        for thread in behind:
            thread.join()
        with ledger.timed("judgement"):
            answer = judge_wait(finding, waited_seconds=60, late_seconds=3600, broken=False)
            text = describe(finding)
        expect(answer.value, "gone" if gone else "wait")
        expect(str(finding.absent), str(tuple(sorted((*gone, *late)))))
        if any(f.absent != finding.absent for f in found) or len(text) > 2000:
            msg = f"Expected one short finding on all ranks, but got {text[:200]}."
            raise ValueError(msg)
        ledger.elected = clients[first.rank].requests
        ledger.requests = max(c.requests for c in clients if c is not clients[first.rank])
        ledger.held = store.largest
        return ledger

    def clean(self) -> Ledger:
        """One audit in which everything matches, drawn and judged."""
        ledger, due = Ledger(), 0
        with ledger.timed("schedule of 1,000 steps"):
            for step in range(1, 1001):
                due += audit_due(step, audit_every=100, checkpoint_every=1000)
                due += fingerprint_due(step, fingerprint_every=100, checkpoint_every=1000)
        with ledger.timed("pairing"):
            pairing = draw_pairing(self.topology, step=STEP, seed=0)
        exchange = MadeUpPeers(self.world, ledger)
        exchange.route({pairing.replayer[0]: torch.zeros(2**20, dtype=torch.uint8)}, (), "audit")
        exchange.max_int64s((0,), "audit")
        facts = AuditFacts(comparisons_total=self.world, pairing=pairing)
        with ledger.timed("judgement"):
            judgement = judge_audit(facts, self.topology, history=History())
        with ledger.timed("memory"):
            remember(History(), facts, judgement, self.topology, step=STEP)
        expect(judgement.outcome.value, "pass")
        return ledger

    def wrong(self, ranks: Sequence[int], outcome: str) -> Ledger:
        """An audit in which these ranks compute wrongly, each in its own way."""
        ledger, bad = Ledger(), frozenset(ranks)
        pairing = draw_pairing(self.topology, step=STEP, seed=0)

        def value(rank: int, producer: int) -> str:
            return f"wrong-{rank}" if rank in bad else f"right-{producer}"

        mismatches = tuple(
            Mismatch(p, r, value(p, p), value(r, p))
            for p, r in enumerate(pairing.replayer)
            if value(p, p) != value(r, p)
        )
        found = {m.producer: m for m in mismatches}
        row = {"producer": 0, "replayer": 1, "outputs_equal": False, "differing": list(range(10)),
               "producer_value": "f" * 33, "replayer_value": "0" * 33, "error": ""}  # fmt: skip
        matched = json.dumps({"matches": True}).encode()
        telling = json.dumps(row).encode()
        exchange = MadeUpPeers(
            self.world, ledger, answer=lambda rank, _: telling if rank in found else matched
        )
        rows = exchange.gather(telling if 0 in found else matched, "audit")
        with ledger.timed("decoding findings"):
            [json.loads(r) for r in rows]
        with ledger.timed("plan of arbitration"):
            plan = plan_arbitration(mismatches, self.topology)
        arbitration = {p: {a: value(a, p) for a in arbiters} for p, arbiters in plan.items()}
        with ledger.timed("settlement"):
            settlement = settle(mismatches, arbitration, domains=self.topology.domains)
        with ledger.timed("plan of repeats"):
            orders = plan_repeats(settlement)
        repeats = {(o.rank, o.producer): (value(o.rank, o.producer),) * o.times for o in orders}
        facts = AuditFacts(
            comparisons_total=self.world, mismatches=mismatches, arbitration=arbitration,
            repeats=repeats, pairing=pairing,
        )  # fmt: skip
        history = History(matched=frozenset(range(self.world)))
        with ledger.timed("judgement"):
            judgement = judge_audit(facts, self.topology, history=history)
        with ledger.timed("memory"):
            remember(history, facts, judgement, self.topology, step=STEP)
        expect(judgement.outcome.value, outcome)
        result = AuditResult(judgement, (), self.world, seconds={})
        self._written(ledger, self.verdicts.replay(STEP, result))
        return ledger

    def disagreement(self, tensors: int) -> Ledger:
        """Rank 1 holds other weights, in so many tensors."""
        ledger = Ledger()
        named = [(f"layers.{i}.weight", torch.full((4,), float(i))) for i in range(TENSORS)]
        state = {"calls": 0}

        def largest(words: Sequence[int]) -> list[int]:
            state["calls"] += 1
            if state["calls"] == 1:  # the digest
                return [2**62, ~0]
            if state["calls"] == 2:  # one pair for each tensor
                return [2**62, ~0] * tensors + list(words[2 * tensors :])
            return list(words)

        def answer(rank: int, message: bytes) -> bytes:
            if rank != 1:
                return message
            pairs, scale = unpack_fingerprints(message)
            return pack_fingerprints([(a ^ 1, b ^ 1) for a, b in pairs], scale)

        exchange = MadeUpPeers(self.world, ledger, largest=largest, answer=answer)
        check = WeightCheck(ReplicaSet(exchange, lambda: named))
        if check.equal("the weight check"):
            msg = "Expected a disagreement, but got equal weights."
            raise ValueError(msg)
        with ledger.timed("gather, judgement"):
            judgement = check.dissent("the weight check", None)
        self._written(ledger, self.verdicts.fingerprint(STEP, judgement, TENSORS))
        return ledger

    def overflow(self) -> Ledger:
        """An fp16 overflow on every rank: the scaler's normal business."""
        ledger = Ledger()
        own = RankFinite(
            rank=0, local=True, reduced=True, loss=False, weights=False, buckets_reduced=9,
            buckets_expected=9, loss_scaled=True,
        )  # fmt: skip

        exchange = MadeUpPeers(self.world, ledger)  # every rank packs the same

        def replay(*_: Any) -> Any:
            msg = "an overflow is not replayed"
            raise AssertionError(msg)

        check = NonfiniteInvestigation(exchange, self.topology, replay, torch.device("cpu"))
        with ledger.timed("gather, judgement"):
            judgement = check.run(STEP, own, ())
        expect(judgement.outcome.value, "reproducible")
        self._written(ledger, self.verdicts.nonfinite(STEP, judgement))
        return ledger


class MemoryStore:
    """What a store of torch.distributed does, in memory.

    Attributes:
        asked: Called when a question has been put to all ranks.
        largest: Bytes of the largest request.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.asked: Callable[[], None] = lambda: None
        self.largest = 0

    def set(self, key: str, value: str) -> None:
        self.multi_set([key], [value], question=False)

    def multi_set(
        self, keys: Sequence[str], values: Sequence[str], *, question: bool = True
    ) -> None:
        with self._changed:
            self._values.update(zip(keys, (v.encode() for v in values), strict=True))
            self.largest = max(self.largest, sum(map(len, keys)) + sum(map(len, values)))
            self._changed.notify_all()
        if question:
            self.asked()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            value = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(value).encode()
            self._changed.notify_all()
            return value

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(
                lambda: self.check(keys), min(timeout.total_seconds(), 600.0)
            ):
                msg = "wait timeout"
                raise RuntimeError(msg)

    def has_extended_api(self) -> bool:
        return True


class StoreClient:
    """One rank's way to the store, which counts its requests."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        self.requests += name != "has_extended_api"
        return getattr(self._store, name)


class CountedStore(dist.Store):
    """A real store that counts the requests that gloo makes."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self.requests = store, 0

    def _counted(self, name: str, *arguments: Any) -> Any:
        self.requests += 1
        return getattr(self._store, name)(*arguments)

    def set(self, key: str, value: Any) -> None:
        self._counted("set", key, value)

    def get(self, key: str) -> Any:
        return self._counted("get", key)

    def add(self, key: str, amount: int) -> Any:
        return self._counted("add", key, amount)

    def check(self, keys: list[str]) -> Any:
        return self._counted("check", keys)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._counted("wait", keys, *timeout)

    def has_extended_api(self) -> bool:
        return False


def run_together(do: Callable[[int], None], ranks: Sequence[int]) -> None:
    """One thread for each rank."""
    threads = [threading.Thread(target=do, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def gloo_requests() -> tuple[int, int]:
    """Store requests of a lazily connecting gloo group: to be made, and for each connection."""
    world, shared = 8, dist.HashStore()
    stores = [CountedStore(shared) for _ in range(world)]
    groups: list[Any] = [None] * world
    made, after = [0] * world, [0] * world

    def run(rank: int) -> None:
        groups[rank] = lazy_group(stores[rank], rank, world, timedelta(seconds=60))
        made[rank] = stores[rank].requests
        # The all-reduce is a ring: with more than two ranks, two connections.
        groups[rank].allreduce([torch.ones(2)]).wait()
        after[rank] = stores[rank].requests

    run_together(run, range(world))
    return max(made), -(-(max(after) - min(made)) // 2)


def expect(got: str, wanted: str) -> None:
    """The simulation is of use only if the guard comes to the right word."""
    if got != wanted:
        msg = f"Expected the outcome {wanted}, but got {got}."
        raise ValueError(msg)


def peak_mb() -> float:
    """The most memory this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def simulate(world: int) -> dict[str, Ledger]:
    """Every scenario at this number of ranks."""
    with tempfile.TemporaryDirectory() as name:
        here = Scenarios(world, Path(name))
        node = range(GPUS_A_NODE, 2 * GPUS_A_NODE)
        ledgers = {
            "init": here.start(),
            "init: all meet": here.meet(),
            "init: a rank never comes": here.meet(missing=1),
            "audit, clean": here.clean(),
            "audit, one suspect": here.wrong((9,), "suspect"),
            "audit, a whole node bad": here.wrong(node, "suspect"),
            "audit, every rank wrong": here.wrong(range(world), "widespread"),
            "fp16 overflow everywhere": here.overflow(),
            "liveness check: a rank killed": here.lost((5,)),
            "liveness check: a node killed": here.lost(tuple(node)),
            "liveness check: a straggler": here.lost((), late=(11,)),
            "one tensor differs": here.disagreement(1),
            "every tensor differs": here.disagreement(TENSORS),
        }
        here.log.close(1.0)
        if len(list(stream_records(Path(name)))) != 6:
            msg = "Expected six records in the event log."
            raise ValueError(msg)
    return ledgers


def table(world: int, ledgers: Mapping[str, Ledger]) -> list[str]:
    """The figures as rows of a Markdown table."""
    rows = []
    for name, ledger in ledgers.items():
        parts = ledger.parts or {"": 0.0}
        slowest = max(parts, key=lambda part: parts[part])
        took = f"{sum(parts.values()):.3f} | {slowest} {parts[slowest]:.3f}" if slowest else " | "
        asked = f"{ledger.requests} / {ledger.elected:,}" if ledger.requests else ""
        rows.append(
            f"| {world:,} | {name} | {ledger.collectives} | {ledger.sent:,} | {ledger.held:,} | "
            f"{asked} | {took} |"
        )
    return rows


@dataclass
class Worst:
    """The largest of every figure that has a limit."""

    part_seconds: float = 0.0
    held: int = 0
    init: int = 0
    liveness: int = 0
    elected: int = 0

    def add(self, ledgers: Mapping[str, Ledger]) -> None:
        for name, ledger in ledgers.items():
            self.part_seconds = max(
                self.part_seconds,
                *(s for part, s in ledger.parts.items() if part not in NOT_ONE_RANK), 0.0,
            )  # fmt: skip
            self.held = max(self.held, ledger.held)
            if name.startswith("init"):
                self.init = max(self.init, ledger.requests)
            if name.startswith("liveness"):
                self.liveness = max(self.liveness, ledger.requests)
            self.elected = max(self.elected, ledger.elected)

    def within(self, seconds: float) -> bool:
        """Whether every limit holds, pure parts taking at most so long."""
        return (
            self.part_seconds <= seconds
            and self.held <= MESSAGE_LIMIT
            and self.init <= INIT_REQUESTS
            and self.liveness <= LIVENESS_REQUESTS
        )


def main() -> int:
    """Simulate, print, and say whether the limits hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 1024, 16_384])
    parser.add_argument(
        "--seconds", type=float, default=PURE_LIMIT_SECONDS, help="limit of a pure part"
    )
    arguments = parser.parse_args()
    worlds, seconds = arguments.worlds, arguments.seconds
    logging.disable(logging.CRITICAL)
    made, connected = gloo_requests()
    before = peak_mb()
    print("| ranks | situation | collectives | bytes sent | held | store requests of a rank / of "
          "the elected one | seconds | slowest part, s |")  # fmt: skip
    print("|---:|---|---:|---:|---:|---:|---:|---|")
    worst, most = Worst(), 0
    for world in worlds:
        ledgers = simulate(world)
        print("\n".join(table(world, ledgers)), flush=True)
        worst.add(ledgers)
        reach = partners(topology_of(world), [0])[0]
        most = max(most, made + connected * (2 + len(reach)))
    memory = peak_mb() - before
    good = worst.within(seconds) and memory <= MEMORY_LIMIT_MB
    print(
        f"{'The limits hold' if good else 'A LIMIT IS BROKEN'} up to {max(worlds):,} ranks: "
        f"slowest part {worst.part_seconds:.2f} s (limit {seconds:g}); largest control "
        f"message {worst.held / 2**20:.1f} MiB (limit 16); store requests of a rank {worst.init} "
        f"in init (limit {INIT_REQUESTS}; gloo's own {most} beside: {made} and {connected} for "
        f"each connection), {worst.liveness} in a liveness check (limit {LIVENESS_REQUESTS}), "
        f"{worst.elected:,} of the one elected rank; memory {memory:.0f} MB (limit "
        f"{MEMORY_LIMIT_MB:g})"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

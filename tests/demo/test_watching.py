from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from sdcwatch.core.grade import Grade, GradedFault, Planted, grade
from sdcwatch.core.records import (
    Check,
    CheckpointEvent,
    CheckpointResult,
    Count,
    GateReason,
    Outcome,
    Progress,
    Record,
    Suspect,
    Verdict,
    encode,
)
from sdcwatch.demo.closing import print_grade
from sdcwatch.demo.display import Display, LineTail, RecordTail, line_of
from sdcwatch.demo.unguarded import chart, conclusion, read_drift


def a_verdict(outcome: Outcome) -> Verdict:
    named = Suspect(
        rank=3,
        node="node-1",
        instance_id="i",
        gpu="g",
        gpu_index=None,
        check=Check.REPLAY,
        mismatches=2,
        comparisons=2,
    )
    return Verdict(
        step=60,
        time=1.0,
        check=Check.REPLAY,
        outcome=outcome,
        reason="because",
        suspects=(named,) if outcome is Outcome.SUSPECT else (),
    )


def shown(records: list[Record]) -> str:
    out = io.StringIO()
    with Display(Console(file=out, width=200), 100) as display:
        for record in records:
            display.show(record)
    return out.getvalue()


def test_every_outcome_but_a_pass_has_a_line_with_its_word() -> None:
    lines = {o: line_of(a_verdict(o)) for o in Outcome}

    assert lines.pop(Outcome.PASS) is None
    texts = {o: line.plain for o, line in lines.items() if line is not None}
    assert len(texts) == len(Outcome) - 1
    assert all(o.value.replace("_", " ") in t.lower() for o, t in texts.items())
    assert texts[Outcome.SUSPECT] == (
        "step   60  ✗ check 2 replay: SUSPECT rank 3 on node-1 (g): because"
    )


def test_a_withheld_checkpoint_says_why() -> None:
    event = CheckpointEvent(
        step=160,
        time=1.0,
        result=CheckpointResult.WITHHELD,
        reason=GateReason.FINGERPRINT,
        detail="replicas differ",
    )
    line = line_of(event)

    assert line is not None
    assert line.plain == "step  160  ✗ checkpoint withheld (fingerprint): replicas differ"


def test_progress_moves_the_bar_and_prints_no_line() -> None:
    count = Count(check=Check.NONFINITE, outcome=Outcome.PASS, count=3)
    record = Progress(step=3, time=1.0, first_step=1, counts=(count,), loss=2.0, plain_steps=3)

    assert shown([record]) == ""
    assert "because" in shown([record, a_verdict(Outcome.SUSPECT)])


def test_text_from_a_run_is_not_read_as_markup() -> None:
    odd = Verdict(
        step=1,
        time=1.0,
        check=Check.REPLAY,
        outcome=Outcome.WIDESPREAD,
        reason="[/bold] [red]x",
    )

    assert "[/bold] [red]x" in shown([odd])


def test_a_line_is_read_once_and_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LineTail(path)
    assert list(tail.lines()) == []

    path.write_text("one\ntw", encoding="utf-8")
    assert list(tail.lines()) == ["one"]
    with path.open("a", encoding="utf-8") as log:
        log.write("o\nthree\n")
    assert list(tail.lines()) == ["two", "three"]
    assert list(tail.lines()) == []


def test_what_is_no_record_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    verdict = a_verdict(Outcome.SUSPECT)
    path.write_text(f'{{"torn": \n{encode(verdict)}\n{{"kind": "other"}}\n', encoding="utf-8")

    assert list(RecordTail(path).records()) == [verdict]


def replica(digest: str, apart: float) -> dict[str, object]:
    return {"digest": digest, "elements": int(apart > 0), "apart": apart}


def write_log(run_dir: Path, entries: list[dict[str, object]]) -> Path:
    text = "".join(json.dumps(e) + "\n" for e in entries)
    (run_dir / "unguarded.jsonl").write_text(text, encoding="utf-8")
    return run_dir


def test_drift_names_the_replica_that_left_the_others(tmp_path: Path) -> None:
    same = [replica("a", 0.0)] * 3
    apart = [replica("a", 0.0), replica("a", 0.0), replica("b", 0.3)]
    entries: list[dict[str, object]] = [
        {"step": 1, "loss": "5.0", "replicas": same},
        {"step": 2, "loss": "nan"},
        {"step": 3, "loss": "3.5", "replicas": apart},
    ]
    drift = read_drift(write_log(tmp_path, entries))

    assert (drift.apart_since, drift.dissenters) == (3, (2,))
    assert conclusion(drift).startswith(
        "The loss went from 5.00 to 3.50. Rank 2 holds other weights than the rest, "
        "seen from step 3 on."
    )


def test_replicas_that_agree_are_said_to_agree(tmp_path: Path) -> None:
    entries: list[dict[str, object]] = [
        {"step": 1, "loss": "5.0", "replicas": [replica("a", 0.0)] * 2}
    ]

    assert "same weights" in conclusion(read_drift(write_log(tmp_path, entries)))


def test_an_unguarded_run_that_never_started_is_no_error(tmp_path: Path) -> None:
    drift = read_drift(tmp_path)

    assert conclusion(drift) == "No step was finished."
    assert chart(drift.losses) == ["(no finite loss)"]


def test_the_curve_falls_as_the_loss_does() -> None:
    lines = chart([(step, 6.0 - step / 50) for step in range(1, 201)])
    dots = [line.rfind("•") for line in lines if "•" in line]

    assert dots == sorted(dots)
    assert lines[0].startswith("  5.98 ┤•")
    assert max(map(len, lines)) <= 80


def test_the_table_of_planted_faults_fits_80_columns() -> None:
    planted = Planted(
        name="a name [red] that is rather long",
        where="bit flip in weight blocks.3.attention.qkv.weight",
        ranks=(3,),
        first_step=60,
        last_step=60,
        expected="verdict",
        check=Check.REPLAY,
        outcome=Outcome.SUSPECT,
        named=(3,),
    )
    out = io.StringIO()
    print_grade(grade([a_verdict(Outcome.SUSPECT)], (planted,)), Console(file=out, width=80))
    table = [line for line in out.getvalue().splitlines() if line[:1] in "┏┃┡│├└"]

    assert max(map(len, table)) <= 80
    assert "✓ right" in out.getvalue()
    assert "[red]" in out.getvalue()


def test_faults_that_were_not_reached_are_not_called_found() -> None:
    def fault(step: int) -> GradedFault:
        planted = Planted(
            name="f",
            where="w",
            ranks=(0,),
            first_step=step,
            last_step=step,
            expected="nothing stated",
        )
        return GradedFault(planted, (), True if step == 1 else None)

    def said(*steps: int) -> str:
        out = io.StringIO()
        console = Console(file=out, width=100)
        print_grade(Grade(tuple(fault(s) for s in steps), (), ()), console)
        return out.getvalue().splitlines()[-1]

    assert said() == "✓ PASSED: nothing planted, no other alarm"
    assert said(1, 1) == "✓ PASSED: all 2 planted faults as expected, no other alarm"
    assert said(1, 9) == "✓ PASSED: 1 of 2 planted faults as expected, 1 open, no other alarm"

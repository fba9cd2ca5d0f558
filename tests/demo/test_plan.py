from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdcwatch.core.records import Check, Outcome
from sdcwatch.demo.settings import (
    AUDIT_EVERY,
    CHECKPOINT_EVERY,
    DEFAULT_STEPS,
    DemoSettings,
    after,
    choose_plan,
    fit_to,
    may_stop,
    new_run,
    planted_of,
    prepare,
)
from sdcwatch.errors import ConfigurationError
from sdcwatch.faults import Fault, FaultPlan


def test_the_default_plan_has_one_fault_for_each_thing_the_demo_shows() -> None:
    planted = planted_of(choose_plan("default", 6), 6)

    assert [(p.check, p.outcome, p.named) for p in planted] == [
        (Check.NONFINITE, Outcome.SUSPECT, (1,)),
        (Check.NONFINITE, Outcome.REPRODUCIBLE, ()),
        (Check.REPLAY, Outcome.SUSPECT, (3,)),
        (Check.REPLAY, Outcome.NOT_REPRODUCED, (4,)),
        (Check.FINGERPRINT, Outcome.SUSPECT, (5,)),
    ]
    assert max(p.last_step for p in planted) < DEFAULT_STEPS


def test_the_nan_of_the_default_plan_is_of_the_kind_that_comes_again() -> None:
    nan = choose_plan("default", 6).faults[0]

    assert (nan.kind, nan.persistence, nan.role) == ("nan", "sticky", "both")


def test_audited_faults_lie_on_audits_and_the_weight_on_a_checkpoint() -> None:
    _, _, sticky, once, weight = planted_of(choose_plan("default", 6), 6)

    audits = [s for s in range(sticky.first_step, sticky.last_step + 1) if s % AUDIT_EVERY == 0]
    assert audits == [sticky.step]
    assert once.first_step % AUDIT_EVERY == 0
    assert weight.first_step % CHECKPOINT_EVERY == 0
    assert weight.first_step > CHECKPOINT_EVERY


def test_the_default_plan_is_made_to_fit_fewer_ranks() -> None:
    plan = choose_plan("default", 4)

    assert [f.ranks for f in plan.faults] == [(1,), (2,), (3,), (0,), (1,)]
    assert [p.named for p in planted_of(plan, 4)] == [(1,), (), (3,), (0,), (1,)]
    with pytest.raises(ConfigurationError, match="at least 3 ranks for the default faults"):
        fit_to(plan, 2)


def test_a_plan_of_your_own_must_fit_the_run(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(FaultPlan(faults=(Fault(site="loss", kind="nan", ranks=(7,)),)).to_yaml())

    with pytest.raises(ConfigurationError, match="Expected ranks below 6, but got rank 7"):
        choose_plan(str(path), 6)
    assert choose_plan(str(path), 8).faults[0].ranks == (7,)


def test_no_plan_plants_nothing() -> None:
    assert choose_plan("none", 1).faults == ()


def test_what_was_planted_before_the_replacement_is_gone_after_it() -> None:
    plan = choose_plan("default", 6)

    assert may_stop(plan)
    assert after(plan, 160).faults == ()
    assert not may_stop(after(plan, 160))
    assert [f.step for f in after(plan, 63).faults] == [100, 160]


def test_a_fault_at_every_step_and_on_every_rank_is_understood() -> None:
    plan = FaultPlan(faults=(Fault(site="loss", kind="nan", ranks="all", expect="miss"),))
    (planted,) = planted_of(plan, 3)

    assert planted.ranks == (0, 1, 2)
    assert planted.acts_at(1)
    assert planted.acts_at(10**6)
    assert planted.expected == "miss"


def test_preparing_keeps_the_plan_and_settles_the_port(tmp_path: Path) -> None:
    plan = choose_plan("default", 6)
    settings = prepare(DemoSettings(run="r", run_dir=tmp_path / "new" / "r"), plan)

    assert settings.metrics_port > 0
    assert settings.plan == settings.run_dir / "plan.yaml"
    assert choose_plan(str(settings.plan), 6) == plan
    assert DemoSettings.load(settings.save()) == settings


def test_a_run_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    settings = DemoSettings(run="r", run_dir=tmp_path)

    with pytest.raises(ConfigurationError, match="Expected a new or empty --run-dir"):
        prepare(settings, FaultPlan())


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = DemoSettings(run="r", run_dir=tmp_path / "file" / "run")

    with pytest.raises(ConfigurationError, match="Expected to create"):
        prepare(settings, FaultPlan())


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    settings = DemoSettings(run="r", run_dir=tmp_path / "run", metrics_host="192.0.2.1")

    with pytest.raises(ConfigurationError, match="address of this machine"):
        prepare(settings, FaultPlan())


def test_two_runs_never_share_a_name() -> None:
    assert len({new_run("demo") for _ in range(50)}) == 50


def test_metrics_linger_between_segments_only_where_somebody_scrapes(tmp_path: Path) -> None:
    def linger(**options: Any) -> float:
        return DemoSettings(run="r", run_dir=tmp_path, **options).linger

    assert linger() == 0.0
    assert linger(serve=True) > 0.0
    assert linger(serve=True, linger_seconds=3.0) == 3.0

from sdcwatch.core.checkpoint import audit_due, fingerprint_due


def test_audits_run_periodically_and_wherever_a_checkpoint_is_due():
    due = [s for s in range(41) if audit_due(s, audit_every=10, checkpoint_every=15)]
    assert due == [10, 15, 20, 30, 40]
    assert not any(audit_due(s, audit_every=10, checkpoint_every=None) for s in (0, 1, 9, 11))


def test_without_audits_a_checkpoint_step_is_none_either():
    assert not any(audit_due(s, audit_every=None, checkpoint_every=5) for s in range(41))


def test_weights_are_compared_at_step_0_periodically_and_before_checkpoints():
    due = [s for s in range(31) if fingerprint_due(s, fingerprint_every=10, checkpoint_every=15)]
    assert due == [0, 10, 15, 20, 30]
    due = [s for s in range(31) if fingerprint_due(s, fingerprint_every=None, checkpoint_every=15)]
    assert due == [0, 15, 30]
    due = [
        s for s in range(31) if fingerprint_due(s, fingerprint_every=None, checkpoint_every=None)
    ]
    assert due == [0]

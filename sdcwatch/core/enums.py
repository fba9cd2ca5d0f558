"""The closed sets of words that records, metrics and decisions are made of."""

from __future__ import annotations

from enum import Enum


class Check(str, Enum):
    """The three checks, in the order in which they run."""

    NONFINITE = "nonfinite"
    REPLAY = "replay"
    FINGERPRINT = "fingerprint"


class Outcome(str, Enum):
    """What a check came to. `SUSPECT` is the only one that names a rank as the source."""

    PASS = "pass"
    SUSPECT = "suspect"
    """One or more ranks are named, with evidence."""
    REPRODUCIBLE = "reproducible"
    """Check 1: another node computes the same non-finite value: data, model or loss scale."""
    UNATTRIBUTED = "unattributed"
    """Something is wrong and the topology or the facts do not allow a name."""
    INCONCLUSIVE = "inconclusive"
    """Check 2: arbitration found no two ranks that agree."""
    NOT_REPRODUCED = "not_reproduced"
    """Check 2: one rank was wrong once and is right when asked again: a strike, a warning."""
    NONDETERMINISTIC = "nondeterministic"
    """Check 2: a rank that agreed differs from itself: the computation does not repeat."""
    WIDESPREAD = "widespread"
    """Too many ranks at once for a single broken device."""
    TRANSPORT = "transport"
    """Check 2: the payload that arrived is not the one that was sent."""
    DIFFERS = "differs"
    """Check 2: sides that differ and never matched in this segment: software or an environment
    until a person has looked."""
    NOT_REDUCED = "not_reduced"
    """Check 1: DDP reduced fewer buckets than the model has: software."""
    VOID = "void"
    """Check 2: the replicas already differed before the audit: check 3 has the verdict."""
    NOT_RUN = "not_run"
    """The check was due and could not run."""


class Action(str, Enum):
    """What the guard did about a verdict."""

    NONE = "none"
    SKIP = "skip"
    """The update was skipped on every rank: gradients zeroed, weights and state untouched."""
    STOP = "stop"
    """All ranks stop with CorruptionDetected."""
    OBSERVE = "observe"
    """mode="observe": reported; the update is made and nothing stops. Checkpoints are withheld."""


class Cause(str, Enum):
    """Why something is wrong, as far as a check can tell."""

    NONE = "none"
    DEVICE = "device"
    """Finite when another node computes it."""
    DATA = "data"
    """Non-finite on another node too: data or model."""
    SCALING = "scaling"
    """Non-finite on another node, finite without the loss scale: the scaler's normal business."""
    REDUCTION = "reduction"
    """Local gradients are finite, the reduced ones are not."""
    OUTSIDE = "outside"
    """Non-finite where it arrived at the finite outputs of the module: made outside of it."""
    SOFTWARE = "software"
    """The training program or its settings differ between ranks; nobody's device."""
    WEIGHTS = "weights"
    """The weights themselves, or buffers that a forward reads, are non-finite."""
    UNKNOWN = "unknown"
    """No replay was possible or could be trusted: one node, coverage off, or rate-limited."""


class Origin(str, Enum):
    """Where check 1 saw the non-finite value."""

    NONE = "none"
    LOCAL = "local"
    REDUCED = "reduced"
    OUTPUT = "output"


class Coverage(str, Enum):
    """How much of check 2 can be trusted on this model and machine."""

    FULL = "full"
    OUTPUTS_ONLY = "outputs_only"
    OFF = "off"


class GuardState(str, Enum):
    """The state of the guard; exactly one at a time."""

    PREFLIGHT = "preflight"
    ARMED = "armed"
    OBSERVING = "observing"
    DEGRADED = "degraded"
    """Checks run, but not all of them: coverage is outputs only or off."""
    TAINTED = "tainted"
    FINISHED = "finished"
    FAILED = "failed"


class RankState(str, Enum):
    """The state of a suspect. Only a person sets `CLOSED`, with ``sdcwatch close``."""

    SUSPECT = "suspect"
    CLOSED = "closed"


class RunWord(str, Enum):
    """The run in one word, the gravest first.

    `CLEAN` takes a clean audit in this segment: never green while blind.
    """

    TAINTED = "tainted"
    SUSPECT = "suspect"
    UNATTRIBUTED = "unattributed"
    NONDETERMINISTIC = "nondeterministic"
    WARNING = "warning"
    NOT_CHECKED = "not checked"
    PARTLY_CHECKED = "partly checked"
    """Only the outputs are compared."""
    CLEAN = "clean"

    def __str__(self) -> str:
        return self.value


class SkipReason(str, Enum):
    """Why an update did not happen."""

    NONFINITE = "nonfinite"
    REPLAY = "replay"
    SCALER = "scaler"
    """GradScaler skipped the step because of its own loss scale: normal under fp16."""
    NOT_STEPPED = "not_stepped"
    """The loop did not call optimizer.step() after a passing backward."""


class CheckpointResult(str, Enum):
    """What became of a checkpoint."""

    SAVED = "saved"
    PROVISIONAL = "provisional"
    """Saved; becomes `CONFIRMED` at the next clean audit."""
    CONFIRMED = "confirmed"
    """An earlier provisional checkpoint, confirmed by a clean audit."""
    WITHHELD = "withheld"
    FAILED = "failed"
    """`save` raised; the error reached every rank."""


class GateReason(str, Enum):
    """Why a checkpoint was saved or withheld."""

    OK = "ok"
    NONFINITE = "nonfinite"
    REPLAY = "replay"
    FINGERPRINT = "fingerprint"
    TAINTED = "tainted"
    AUDIT_TOO_OLD = "audit_too_old"
    NO_AUDIT = "no_audit"
    NOT_PREFLIGHTED = "not_preflighted"
    SAVE_ERROR = "save_error"
    SUSPECT = "suspect"
    """A device has been named and nobody has closed it."""
    WIDESPREAD = "widespread"
    """Too many ranks differed, and the ring has not been clean since."""
    DIFFERS = "differs"
    """Ranks that never matched are left out of the audit."""
    WEIGHTS_NONFINITE = "weights_nonfinite"
    FRAMEWORK = "framework"
    """`Guard.may_save` allowed it; whether the framework's write succeeded is not known here."""


class Phase(str, Enum):
    """What a duration of a check covers."""

    PROBE = "probe"
    AGREE = "agree"
    CAPTURE = "capture"
    EXCHANGE = "exchange"
    REPLAY = "replay"
    BLAME = "blame"
    DIGEST = "digest"

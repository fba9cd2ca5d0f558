"""Configuration of the guard and of its telemetry: frozen, keyword-only, checked at construction.

This is the only module that reads the environment, and only when asked: `GuardConfig.from_env`,
`launcher_environment` and `relevant_variables`. Arguments beat the environment.
"""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from sdcwatch.errors import ConfigurationError, expect, nearest, slip_of

if TYPE_CHECKING:
    from sdcwatch.sinks.base import Sink

Export = Literal["leader", "node", "all"]
_LARGEST = 2**63
"""Steps and seeds travel as integers of 64 bits, sign included."""

_PLAIN: Mapping[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    tuple: "a tuple",
    Mapping: "a mapping",
    Path: "a path",
    type(None): "None",
}


def require_types(config: Any) -> None:
    """Check that every field of a config dataclass has the type that it is annotated with.

    Raises:
        ConfigurationError: A field has another; it is named, with what it should be.
    """
    for name, hint in get_type_hints(type(config)).items():
        if name not in type(config).__dataclass_fields__:
            continue
        value = getattr(config, name)
        choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        words = list(dict.fromkeys(_words_of(choice) for choice in choices))
        expect(
            any(_fits(value, choice) for choice in choices),
            f"`{name}` to be {' or '.join(words)}",
            value,
            f"Pass {words[0]}.",
        )
        _require_reach(name, value, hint)


def _require_reach(name: str, value: object, hint: Any) -> None:
    """Refuse what has the right type and can be sent, or written to, nowhere."""
    if isinstance(value, int):
        small = abs(value) < _LARGEST
        expect(small, f"`{name}` to fit into 64 bits", value, "Pass a smaller number.")
    if Path in get_args(hint) and value is not None:
        usable = value != "" and "\0" not in str(value)
        expect(usable, f"`{name}` to be the path of a folder", value, 'Pass one, such as "runs/a".')


def _words_of(hint: Any) -> str:
    if get_origin(hint) is Literal:
        words = get_args(hint)
        return repr(words[0]) if len(words) == 1 else f"one of {words}"
    plain = get_origin(hint) or hint
    return _PLAIN.get(plain) or f"a {plain.__name__}"


def _fits(value: object, hint: Any) -> bool:
    if hint is Any:
        return True
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if hint in (int, float):  # True is an int to Python and a mistake here
        numbers = int if hint is int else (int, float)
        finite = not isinstance(value, float) or math.isfinite(value)
        return isinstance(value, numbers) and not isinstance(value, bool) and finite
    return isinstance(value, get_origin(hint) or hint)


def _positive(name: str, value: object, *, optional: bool = False) -> None:
    ok = (value is None and optional) or (
        isinstance(value, int) and not isinstance(value, bool) and value > 0
    )
    also = " or None" if optional else ""
    expect(ok, f"`{name}` to be a positive integer{also}", value, "Pass a number of steps >= 1.")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    expect(value in allowed, f"`{name}` to be one of {allowed}", value, "Pass one of them.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Where records go besides `events.jsonl`.

    Attributes:
        prometheus: Serve /metrics from the exporting ranks.
        prometheus_host: Address to bind; loopback unless told otherwise.
        prometheus_port: Port of local rank 0; local rank i takes port + i. 0 takes any free port,
            found through `file_sd_dir`.
        file_sd_dir: Directory for Prometheus file_sd entries, one per exporting process.
        otlp: Push over OTLP/HTTP; None means: if a standard OTEL_EXPORTER_OTLP_* endpoint is set.
        export: Which ranks export: the leader, one per node, or all.
        wandb: Use `wandb.run` if the script has one.
        wandb_init: Keyword arguments for `wandb.init` if there is none; None never calls it.
        logs: Send each non-pass verdict as an OpenTelemetry log record too (experimental).
        queue_size: Records that may wait; more are dropped and counted.
        close_seconds: Budget of `close()` for all sinks together, in seconds; they close side by
            side.
        linger_seconds: How long /metrics stays up after the run in any case. Where it was scraped
            before, the end waits for one more scrape: two intervals, at most a minute.
        dashboard_url: URL of the Grafana Run dashboard, for links.
    """

    prometheus: bool = True
    prometheus_host: str = "127.0.0.1"
    prometheus_port: int = 9464
    file_sd_dir: Path | str | None = None
    otlp: bool | None = None
    export: Export = "leader"
    wandb: bool = True
    wandb_init: Mapping[str, Any] | None = None
    logs: bool = True
    queue_size: int = 4096
    close_seconds: float = 2.0
    linger_seconds: float = 0.0
    dashboard_url: str = ""

    def __post_init__(self) -> None:
        """Check every field; a path may be given as a string."""
        require_types(self)
        if self.file_sd_dir is not None:
            object.__setattr__(self, "file_sd_dir", Path(self.file_sd_dir))
        _positive("queue_size", self.queue_size)
        expect(
            0 <= self.prometheus_port <= 65535,
            "`prometheus_port` between 0 and 65535",
            self.prometheus_port,
            "Pass 0 for any free port.",
        )
        for name in ("close_seconds", "linger_seconds"):
            value = getattr(self, name)
            expect(value >= 0, f"`{name}` >= 0", value, "Pass seconds.")
        expect(
            all(isinstance(key, str) for key in self.wandb_init or ()),
            "`wandb_init` to hold arguments of wandb.init by name",
            self.wandb_init,
            'Pass {"project": ...}.',
        )
        expect(
            self.dashboard_url == "" or re.match(r"https?://\S+$", self.dashboard_url) is not None,
            "`dashboard_url` to start with http:// or https://",
            self.dashboard_url,
            "Pass a full URL.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """How the guard checks, what it does about a failure, and who it says it is.

    Attributes:
        audit_every: Steps between replay audits; None turns check 2 off.
        fingerprint_every: Steps between weight fingerprints; None turns check 3 off except at
            step 0 and before a checkpoint.
        checkpoint_every: Steps at which checkpoints are due: made audit steps ahead of time.
        max_audit_age: Largest age in steps of the last clean audit at which a checkpoint is saved;
            default `audit_every`, and 0 on `checkpoint_every` steps.
        mode: "enforce", or "observe": report, leave every update as it is and never stop;
            `save_checkpoint` withholds in both.
        on_failure: "skip" the update, or "stop" all ranks.
        max_consecutive_skips: After that many skips in a row "skip" becomes "stop".
        start_step: Last step already done, on resume; the next one is `start_step + 1`.
        run: Name of the run; default from the launcher, else the start time.
        run_dir: Where events.jsonl goes; default ``sdcwatch-runs/<run>``.
        fault_domain: What counts as independent hardware: "node" or "gpu"; "auto" means nodes if
            there are three, else GPUs with a warning.
        quorum: Different ranks that must agree before another is named.
        buffers: Fingerprint floating-point buffers too (check 3). BatchNorm statistics differ
            between replicas by design.
        preflight_micro_batches: Micro-batches recomputed before arming.
        deadline_seconds: After that long in an operation of the guard the other ranks are asked
            where they are: one that has gone, or went past it, ends the run.
        late_seconds: How long a rank that is alive and behind is waited for.
        hang_seconds: Time that a backward may take before the liveness check.
        on_hang: "report", or "exit" with code 84 after a liveness check that some rank did not
            answer.
        handle_sigterm: On SIGTERM, end the run with a last record and a bounded wait for a scrape,
            where the program has no handler of its own; False leaves the signal alone.
        node: Name of this rank's node; default `SDCWATCH_NODE`, else the host name.
        instance_id: What a replacement request names; default `SDCWATCH_INSTANCE_ID`, else the
            host name.
        gpu_uuid: UUID of this rank's device; default read from the device.
        seed: Seed of the pairing.
        scaler: The GradScaler of the loop; found by itself where there is one.
        max_payload_mb: Largest micro-batch, in MiB, that an audit may send, and the most that a
            step may keep for a replay; beyond it coverage is off, or that audit is not run.
        local: Patterns of the parameters and buffers that belong to each rank alone, as in a shell
            (``("experts.*",)``): left out of comparisons between ranks, as DDP's ignore list is.
        comm_hook: ``(state, hook)`` of your own DDP communication hook, composed with the guard's.
        telemetry: Where records go; "off" for events.jsonl alone.
        console: Print one line per event on the leader.
    """

    audit_every: int | None = 100
    fingerprint_every: int | None = 10
    checkpoint_every: int | None = None
    max_audit_age: int | None = None
    mode: Literal["enforce", "observe"] = "enforce"
    on_failure: Literal["skip", "stop"] = "skip"
    max_consecutive_skips: int = 10
    start_step: int = 0
    run: str | None = None
    run_dir: Path | str | None = None
    fault_domain: Literal["auto", "node", "gpu"] = "auto"
    quorum: int = 2
    buffers: bool = False
    preflight_micro_batches: int = 2
    deadline_seconds: float = 60.0
    late_seconds: float = 3600.0
    hang_seconds: float = 300.0
    on_hang: Literal["report", "exit"] = "report"
    handle_sigterm: bool = True
    node: str | None = None
    instance_id: str | None = None
    gpu_uuid: str | None = None
    seed: int = 0
    scaler: Any = None
    max_payload_mb: int = 1024
    local: tuple[str, ...] = ()
    comm_hook: tuple[object, Callable[..., Any]] | None = None
    telemetry: TelemetryConfig | Literal["off"] = field(default_factory=TelemetryConfig)
    console: bool = True

    def __post_init__(self) -> None:
        """Check every field that can be checked without the model."""
        # Before the types, which would say no more than that an integer is wanted.
        for name in ("audit_every", "fingerprint_every", "checkpoint_every"):
            _positive(name, getattr(self, name), optional=True)
        for name in ("max_consecutive_skips", "preflight_micro_batches", "max_payload_mb"):
            _positive(name, getattr(self, name))
        if isinstance(self.local, list):
            object.__setattr__(self, "local", tuple(self.local))
        require_types(self)
        expect(
            all(isinstance(pattern, str) and pattern for pattern in self.local),
            "`local` to hold names or patterns of tensors",
            self.local,
            'Pass strings, such as local=("experts.*",).',
        )
        self._check_what_is_called()
        _one_of("quorum", str(self.quorum), ("2", "3"))
        for name in ("start_step", "max_audit_age"):
            value = getattr(self, name)
            ok = value is None or (isinstance(value, int) and value >= 0)
            expect(ok, f"`{name}` >= 0", value, "Pass a number of steps.")
        for name in ("deadline_seconds", "late_seconds", "hang_seconds"):
            expect(getattr(self, name) > 0, f"`{name}` > 0", getattr(self, name), "Pass seconds.")

    def _check_what_is_called(self) -> None:
        hook = self.comm_hook
        expect(
            hook is None or (len(hook) == 2 and callable(hook[1])),
            "`comm_hook` to be a pair of a state and a hook",
            hook,
            "Pass what register_comm_hook would be given: (state, hook).",
        )
        asked = ("get_scale", "is_enabled")
        expect(
            self.scaler is None or all(callable(getattr(self.scaler, n, None)) for n in asked),
            "`scaler` to be a GradScaler or None",
            self.scaler,
            "Pass the one that the loop steps, or leave it out.",
        )

    @property
    def audit_age_limit(self) -> int | None:
        """Largest age of the last clean audit at which a checkpoint may be saved, in steps."""
        return self.audit_every if self.max_audit_age is None else self.max_audit_age

    @classmethod
    def from_env(cls, **arguments: Any) -> GuardConfig:
        """A config from ``SDCWATCH_<FIELD>`` variables, with `arguments` winning over them.

        Raises:
            ConfigurationError: A variable cannot be read as the type of its field.
        """
        names = {f.name for f in fields(cls)}
        unknown = sorted(set(arguments) - names)
        do = nearest(unknown[0], sorted(names)) if unknown else ""
        expect(not unknown, f"options among {sorted(names)}", unknown, do)
        values = {n: os.environ[v] for n in names if (v := f"SDCWATCH_{n.upper()}") in os.environ}
        values.pop("comm_hook", None)
        values.pop("scaler", None)
        return cls(**{**{n: _parse(n, v) for n, v in values.items()}, **arguments})


class GuardOptions(TypedDict, total=False):
    """The options of `sdcwatch.init`, for completion and type checks: see `GuardConfig`.

    ``sinks`` takes further sinks beside those of `telemetry`.
    """

    audit_every: int | None
    fingerprint_every: int | None
    checkpoint_every: int | None
    max_audit_age: int | None
    mode: Literal["enforce", "observe"]
    on_failure: Literal["skip", "stop"]
    max_consecutive_skips: int
    start_step: int
    run: str | None
    run_dir: Path | str | None
    fault_domain: Literal["auto", "node", "gpu"]
    quorum: int
    buffers: bool
    preflight_micro_batches: int
    deadline_seconds: float
    late_seconds: float
    hang_seconds: float
    on_hang: Literal["report", "exit"]
    handle_sigterm: bool
    node: str | None
    instance_id: str | None
    gpu_uuid: str | None
    seed: int
    scaler: Any
    max_payload_mb: int
    local: tuple[str, ...]
    comm_hook: tuple[object, Callable[..., Any]] | None
    telemetry: TelemetryConfig | Literal["off"]
    console: bool
    sinks: Sequence[Sink]


_INTEGERS = frozenset(
    (
        "audit_every",
        "checkpoint_every",
        "fingerprint_every",
        "max_audit_age",
        "max_consecutive_skips",
        "max_payload_mb",
        "preflight_micro_batches",
        "quorum",
        "seed",
        "start_step",
    )
)
_KERNEL_VARIABLES = (
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_COMPILE_DISABLE",
    "TORCH_CUDNN_V8_API_DISABLED",
)
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def _parse(name: str, text: str) -> Any:
    try:
        if name in _INTEGERS:
            return None if text.lower() == "none" else int(text)
        if name in ("deadline_seconds", "late_seconds", "hang_seconds"):
            return float(text)
        if name in ("buffers", "console", "handle_sigterm"):
            return _BOOLEANS[text.lower()]
        if name == "local":
            return tuple(part.strip() for part in text.split(",") if part.strip())
    except (ValueError, KeyError):
        variable = f"SDCWATCH_{name.upper()}"
        msg = f"Expected {variable} to be readable as `{name}`, but got {text!r}. Correct it."
        raise ConfigurationError(msg) from None
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEnvironment:
    """What the launcher says about this process.

    Attributes:
        run: Name of the run, or None.
        local_rank: Rank within the machine.
        restart_count: How often the launcher restarted the group.
        otlp_endpoint: Whether the standard variables name an OTLP endpoint for metrics, and
            OTEL_METRICS_EXPORTER is not "none".
        otlp_logs_endpoint: The same for log records.
        otel_disabled: Whether OTEL_SDK_DISABLED is true.
        cublas_workspace: CUBLAS_WORKSPACE_CONFIG, or None.
        kernel_variables: Other variables that decide which kernels run, those that are set.
    """

    run: str | None
    local_rank: int
    restart_count: int
    otlp_endpoint: bool
    otel_disabled: bool
    cublas_workspace: str | None
    otlp_logs_endpoint: bool = False
    kernel_variables: Mapping[str, str] = field(default_factory=dict)


def _pushes(signal: str) -> bool:
    """Whether the standard variables ask for an OTLP push of this signal."""
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    wanted = os.environ.get(f"OTEL_{signal}_EXPORTER", "").lower() != "none"
    return wanted and any(os.environ.get(name) for name in names)


def kernel_variables() -> dict[str, str]:
    """The variables that decide which kernels run, those that are set."""
    return {name: os.environ[name] for name in _KERNEL_VARIABLES if name in os.environ}


def _count_in(*names: str) -> int:
    """The first of some variables of a launcher that is set; 0 without."""
    name = next((n for n in names if os.environ.get(n)), None)
    if name is None:
        return 0
    text = os.environ[name]
    valid = text.isascii() and text.isdecimal() and len(text) < len(str(_LARGEST))
    expect(valid, f"{name} to be a number, as launchers set it", text, "Correct it, or unset it.")
    return int(text)


def launcher_environment() -> LauncherEnvironment:
    """Read what torchrun, Slurm and OpenTelemetry put into the environment.

    Raises:
        ConfigurationError: A variable of the launcher holds no number.
    """
    env = os.environ
    elastic = env.get("TORCHELASTIC_RUN_ID")
    run = elastic if elastic and elastic != "none" else env.get("SLURM_JOB_ID")
    return LauncherEnvironment(
        run=run,
        local_rank=_count_in("LOCAL_RANK", "SLURM_LOCALID"),
        restart_count=_count_in("TORCHELASTIC_RESTART_COUNT"),
        otlp_endpoint=_pushes("METRICS"),
        otlp_logs_endpoint=_pushes("LOGS"),
        otel_disabled=env.get("OTEL_SDK_DISABLED", "").lower() == "true",
        cublas_workspace=env.get("CUBLAS_WORKSPACE_CONFIG"),
        kernel_variables=kernel_variables(),
    )


def gloo_interfaces() -> tuple[str, ...]:
    """The network interfaces that gloo is told to use, in GLOO_SOCKET_IFNAME; () for its choice."""
    return tuple(name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name)


_RELEVANT = re.compile(
    r"(SDCWATCH|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|NCCL|GLOO|TP|CUDA|CUBLAS|CUDNN|NVIDIA|OTEL|WANDB"
    r"|OMP|MKL|KMP|GOMP|DNNL|ONEDNN|OPENBLAS)_|(PYTHONHASHSEED|(LOCAL_)?WORLD_SIZE|SLURM_NTASKS)$"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|HEADERS")
_CREDENTIALS = re.compile(r"(?<=://)[^/@]+@")
_PREFIX = "SDCWATCH_"


def relevant_variables() -> dict[str, str]:
    """The variables that decide what torch, NCCL, gloo, telemetry and the guard do, if not empty.

    The values of keys, tokens, passwords and headers are left out, and so are the credentials in
    a URL: what is returned may be printed.
    """
    found = {}
    for name, value in sorted(os.environ.items()):
        if value and _RELEVANT.match(name):
            found[name] = "(set)" if _SECRET.search(name) else _CREDENTIALS.sub("", value)
    return found


def unknown_options(names: Iterable[str]) -> dict[str, str]:
    """The ``SDCWATCH_*`` among `names` that set no option, each with what to do about it."""
    known = _variables()
    unknown = [n for n in names if n.startswith(_PREFIX) and n not in known]
    return {name: nearest(name, known) for name in unknown}


def misspelt_variables() -> dict[str, str]:
    """Variables of this process that set no option, each with the one that it is a slip of."""
    unknown = unknown_options(os.environ)
    return {name: slip for name in unknown if (slip := slip_of(name, _variables()))}


def _variables() -> list[str]:
    return [f"{_PREFIX}{f.name.upper()}" for f in fields(GuardConfig)]

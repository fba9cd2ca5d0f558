"""Kernels that repeat, for as long as an audit lasts, and the facts that decide which kernels run.

Deterministic mode is asked for with warnings only: an operation without a deterministic form must
not end somebody's training. Its warnings are silenced while the switches are on, because the
preflight measures what they only guess. Scaled dot-product attention keeps, on a GPU, the one
backend whose backward repeats in this mode: the fused ones stay nondeterministic under
``warn_only``. Who trains in the strict mode keeps it, and its backends. On a CPU every backend
repeats and none is switched.
"""

from __future__ import annotations

import platform
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TypeVar

import torch
from torch.utils import deterministic

_T = TypeVar("_T")
_WARN, _ERROR = 1, 2  # torch's deterministic debug modes
_WARNINGS = re.compile(r".*(deterministic|CUBLAS_WORKSPACE_CONFIG)", re.IGNORECASE | re.DOTALL)
_DRIVER = Path("/proc/driver/nvidia/version")


class DeterministicSwitches:
    """Applies deterministic switches and puts back what was there before.

    `apply` and `restore` may each be called again without effect. As a context manager it may be
    entered inside itself; the outermost exit restores.

    Args:
        device: Device of the module; attention backends are switched on a GPU only.

    Example:
        >>> with DeterministicSwitches(torch.device("cpu")):
        ...     torch.are_deterministic_algorithms_enabled()
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._undo: ExitStack | None = None
        self._depth = 0

    @property
    def applied(self) -> bool:
        """Whether the switches are on."""
        return self._undo is not None

    def apply(self) -> None:
        """Turn the switches on. An exception half-way puts everything back."""
        if self._undo is not None:
            return
        with ExitStack() as stack:
            _silence_warnings(stack)
            mode = torch.get_deterministic_debug_mode()
            # Through the debug mode, because use_deterministic_algorithms() imports the compiler.
            stack.callback(torch.set_deterministic_debug_mode, mode)
            torch.set_deterministic_debug_mode(max(mode, _WARN))
            _switch_attribute(stack, deterministic, "fill_uninitialized_memory", False)
            _switch_attribute(stack, torch.backends.cudnn, "deterministic", True)
            _switch_attribute(stack, torch.backends.cudnn, "benchmark", False)
            if self._device.type == "cuda" and mode != _ERROR:
                _only_math_attention(stack)
            self._undo = stack.pop_all()

    def restore(self) -> None:
        """Put back what `apply` found."""
        undo, self._undo = self._undo, None
        self._depth = 0
        if undo is not None:
            undo.close()

    def __enter__(self) -> DeterministicSwitches:
        self.apply()
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self.restore()


def _switch(
    stack: ExitStack, read: Callable[[], _T], write: Callable[[_T], object], value: _T
) -> None:
    stack.callback(write, read())
    write(value)


def _switch_attribute(stack: ExitStack, owner: object, name: str, value: bool) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _only_math_attention(stack: ExitStack) -> None:
    backends = torch.backends.cuda
    _switch(stack, backends.math_sdp_enabled, backends.enable_math_sdp, True)
    _switch(stack, backends.flash_sdp_enabled, backends.enable_flash_sdp, False)
    _switch(stack, backends.mem_efficient_sdp_enabled, backends.enable_mem_efficient_sdp, False)
    _switch(stack, backends.cudnn_sdp_enabled, backends.enable_cudnn_sdp, False)


def _silence_warnings(stack: ExitStack) -> None:
    # Not warnings.catch_warnings: leaving it would undo filters that user code set meanwhile. Not
    # warnings.filterwarnings: it makes every "once" warning of the program appear once more.
    entry = ("ignore", _WARNINGS, UserWarning, None, 0)
    filters = warnings.filters
    filters.insert(0, entry)  # type: ignore[attr-defined]

    def remove() -> None:
        if entry in warnings.filters:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]

    stack.callback(remove)


def environment_facts(
    device: torch.device,
    *,
    compiled: bool = False,
    cublas_workspace: str | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """What decides which kernels run, as text; ranks with different facts may differ in bits.

    Args:
        device: Device of the module.
        compiled: Whether the module runs through torch.compile.
        cublas_workspace: CUBLAS_WORKSPACE_CONFIG of the process, as the configuration read it.
        variables: Other variables of the process that decide about kernels; each is a fact.
    """
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": device.type,
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
        "cudnn_tf32": str(torch.backends.cudnn.allow_tf32),
        "deterministic_mode": str(torch.get_deterministic_debug_mode()),
        "compiled": str(compiled),
        "cublas_workspace": cublas_workspace or "",
    }
    if device.type == "cuda":
        facts |= _cuda_facts(device)
    return facts | {name.lower(): value for name, value in variables.items()}


def _cuda_facts(device: torch.device) -> dict[str, str]:
    matmul = torch.backends.cuda.matmul
    return {
        "cuda": str(torch.version.cuda or torch.version.hip),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "driver": driver_version(),
        "gpu": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "multiprocessors": str(torch.cuda.get_device_properties(device).multi_processor_count),
        "reduced_precision_bf16": str(matmul.allow_bf16_reduced_precision_reduction),
        "reduced_precision_fp16": str(matmul.allow_fp16_reduced_precision_reduction),
    }


_LIBRARIES = ("numpy", "triton", "flash-attn", "transformer-engine", "xformers", "bitsandbytes")


@cache
def software_facts() -> Mapping[str, str]:
    """What may change results without choosing kernels, as text: asked where bits differ.

    The hash of a string tells whether processes iterate over sets of strings in the same order.
    """
    facts = {"string_hash": f"{hash('sdcwatch') & 0xFFFFFFFF:08x}"}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            facts[name.replace("-", "_")] = version(name)
    return MappingProxyType(facts)


def driver_version() -> str:
    """Version of the NVIDIA driver, or "unknown"."""
    try:
        text = _DRIVER.read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r"Kernel Module.*?(\d+(?:\.\d+)+)", text)
    return found.group(1) if found else "unknown"

"""Who this rank is, and what it guards: checked before anything is changed."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sdcwatch.config import GuardConfig, LauncherEnvironment
from sdcwatch.core.topology import RankInfo
from sdcwatch.errors import ConfigurationError
from sdcwatch.guard.exchange import Exchange
from sdcwatch.guard.hook import released_screen
from sdcwatch.guard.optimizer import unwrap
from sdcwatch.sinks.wandb_run import active_run_id


def bare_module(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod") and isinstance(model._orig_mod, torch.nn.Module):
            model = model._orig_mod
        else:
            return model


def find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper, also around or inside torch.compile; None if there is none."""
    if isinstance(model, DistributedDataParallel):
        return model
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, DistributedDataParallel) else None


def is_compiled(model: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Whether torch.compile is around or inside either module, or `compile()` was called on one.

    Args:
        model: As the loop calls it.
        module: What DDP calls.
    """
    return any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        for whole in (model, module)
        for part in whole.modules()
    )


def unguarded_parameters(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the trainable parameters of `module` that `optimizer` does not hold."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]


def require_guardable(
    model: torch.nn.Module, optimizer: Any, loss_fn: Callable[..., Any], config: GuardConfig
) -> tuple[DistributedDataParallel | None, torch.optim.Optimizer]:
    """Check what `sdcwatch.init` was given.

    Returns:
        The DDP wrapper or None, and the innermost optimizer.

    Raises:
        ConfigurationError: Something cannot be guarded; the message says what to do.
    """
    if not isinstance(model, torch.nn.Module):
        msg = (
            f"Expected `model` to be a torch.nn.Module, but got {type(model)}. Pass the DDP model."
        )
        raise ConfigurationError(msg)
    if not callable(loss_fn):
        msg = (
            f"Expected `loss_fn` to be callable as loss_fn(model, batch), but got {type(loss_fn)}. "
            "Pass the function that computes the loss."
        )
        raise ConfigurationError(msg)
    inner = unwrap(optimizer)
    _refuse_sharding(model, inner)
    ddp = find_ddp(model)
    if ddp is None and config.audit_every is not None:
        msg = (
            "Expected `model` to be a DistributedDataParallel model, because audits are on, but "
            f"got {type(model).__name__}. Wrap it in DDP, or pass audit_every=None."
        )
        raise ConfigurationError(msg)
    if ddp is not None and has_comm_hook(ddp):
        msg = (
            "Expected a DDP model without a communication hook, but got one that has one. Pass it "
            "as sdcwatch.init(..., comm_hook=(state, hook)) instead of registering it."
        )
        raise ConfigurationError(msg)
    ours = {id(p) for p in bare_module(model).parameters()}
    theirs = [p for group in inner.param_groups for p in group["params"]]
    if not any(id(p) in ours for p in theirs):
        msg = (
            "Expected `optimizer` to update parameters of `model`, but got one that holds none of "
            "them. Build it from model.parameters()."
        )
        raise ConfigurationError(msg)
    return ddp, inner


def _is_a(thing: object, name: str) -> bool:
    """Whether a class of that name is among its types; no such class is imported for the answer."""
    return any(kind.__name__ == name for kind in type(thing).__mro__)


def _refuse_sharding(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what keeps another part of the weights or of the state on each rank."""
    if any(_is_a(part, "FullyShardedDataParallel") for part in model.modules()):
        msg = (
            "Expected every rank to hold the whole model, but got FullyShardedDataParallel. Train "
            "with DistributedDataParallel: shards have no replica to be compared with."
        )
        raise ConfigurationError(msg)
    sharded = [name for name, p in model.named_parameters() if _is_a(p, "DTensor")]
    if sharded:
        msg = (
            f"Expected every rank to hold the whole model, but got DTensor parameters, the first "
            f"of {len(sharded)} is {sharded[0]}. Train with DistributedDataParallel, without "
            "fully_shard or tensor parallelism: shards have no replica to be compared with."
        )
        raise ConfigurationError(msg)
    if _is_a(optimizer, "ZeroRedundancyOptimizer"):
        msg = (
            "Expected an optimizer that updates all weights on every rank, but got "
            "ZeroRedundancyOptimizer. Pass the optimizer that it shards, built from "
            "model.parameters(): one rank's update would reach the others without a comparison."
        )
        raise ConfigurationError(msg)


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a communication hook is registered already, other than a closed guard's."""
    return bool(getattr(ddp, "_comm_hooks", None)) and released_screen(ddp) is None


def make_run_dir(config: GuardConfig, run: str) -> Path:
    """The run's directory, made and found writable.

    Raises:
        ConfigurationError: It is not.
    """
    path = Path(config.run_dir) if config.run_dir is not None else Path("sdcwatch-runs") / run
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-test-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        msg = (
            f"Expected `run_dir` to be writable, but got {error.strerror} for {path}. Pass a "
            "directory that every rank's user may write."
        )
        raise ConfigurationError(msg) from error
    return path


def run_name(config: GuardConfig, environment: LauncherEnvironment) -> str:
    """Name of the run: configured, else the launcher's, else the W&B run's, else the start time."""
    known = config.run or environment.run or active_run_id()
    return known or time.strftime("run-%Y%m%d-%H%M%S", time.gmtime())


def agree_on_run(exchange: Exchange, name: str) -> str:
    """The leader's name of the run: start times differ between ranks. Every rank calls it."""
    return exchange.gather(name.encode(), "the name of the run")[0].decode()


def own_identity(
    exchange: Exchange, config: GuardConfig, environment: LauncherEnvironment, device: torch.device
) -> RankInfo:
    """The identity of this rank."""
    host = socket.gethostname()
    node = config.node or host
    index, uuid = _gpu(device)
    return RankInfo(
        rank=exchange.rank,
        node=node,
        host=host,
        local_rank=environment.local_rank,
        pid=os.getpid(),
        instance_id=config.instance_id or node,
        gpu_index=index,
        gpu_uuid=config.gpu_uuid or uuid,
    )


def _gpu(device: torch.device) -> tuple[int | None, str | None]:
    if device.type != "cuda":
        return None, None
    index = device.index if device.index is not None else torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return index, None if uuid is None else f"GPU-{uuid}"


def gather_ranks(exchange: Exchange, own: RankInfo) -> tuple[RankInfo, ...]:
    """The identity of every rank. Every rank calls it."""
    rows = exchange.gather(json.dumps(asdict(own)).encode(), "the gathering of the topology")
    return tuple(RankInfo(**json.loads(row)) for row in rows)

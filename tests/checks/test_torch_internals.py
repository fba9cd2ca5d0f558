"""What the checks rely on in torch without its promise."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sdcwatch.checks import torch_internals as internals


def in_backward(look, run=lambda loss, module: loss.backward()):
    """What `look(module)` gives inside a backward, and what the backward left."""
    module, seen = nn.Linear(3, 2), []
    loss = module(torch.ones(1, 3)).sum()
    internals.edge_of(loss).node.register_prehook(lambda g: seen.append(look(module)))
    run(loss, module)
    return seen[0], loss


def leaf_nodes(module):
    return [internals.edge_of(p).node for p in module.parameters()]


def test_a_leaf_has_one_accumulation_for_as_long_as_it_is_held():
    weight = nn.Parameter(torch.ones(2))
    node = internals.edge_of(weight).node
    assert internals.accumulates(node)
    assert internals.edge_of(weight * 2).node.next_functions[0][0] is node


def test_tensors_in_one_storage_share_memory_and_others_do_not():
    whole = torch.zeros(4, 4)
    assert internals.share_memory(whole, whole.t()[1:])
    assert internals.share_memory(whole.detach(), whole.expand(2, 4, 4))
    assert not internals.share_memory(whole, whole.clone())
    assert not internals.share_memory(whole, whole.to_sparse())


def test_a_graph_task_has_a_number_inside_a_backward_only():
    number, _ = in_backward(lambda module: internals.current_graph_task())
    assert number >= 0
    assert internals.current_graph_task() == -1


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda loss, module: loss.backward(), True),
        (lambda loss, module: loss.backward(inputs=[module.weight]), True),
        (lambda loss, module: torch.autograd.grad(loss, list(module.parameters())), False),
    ],
    ids=["backward", "backward into inputs", "autograd.grad"],
)
def test_the_engine_says_whether_it_will_accumulate(run, expected):
    seen, _ = in_backward(
        lambda module: any(map(internals.will_accumulate, module.parameters())), run
    )
    assert seen is expected


@pytest.mark.parametrize("retain", [False, True])
def test_the_roots_of_a_running_backward_are_on_the_stack(retain):
    def run(loss, module):
        loss.backward(retain_graph=retain)

    (running,), loss = in_backward(lambda module: internals.running_backwards(), run)
    assert running.roots == (loss.grad_fn,)
    assert running.retains_graph is retain
    assert running.accumulates
    assert internals.running_backwards() == []


def test_the_roots_are_found_from_another_thread():
    found = []

    def look(module):
        thread = threading.Thread(target=lambda: found.extend(internals.running_backwards()))
        thread.start()
        thread.join()

    _, loss = in_backward(look)
    assert [running.roots for running in found] == [(loss.grad_fn,)]


def test_a_reentrant_checkpoint_is_known_by_name_and_is_a_second_backward():
    module, running = nn.Linear(3, 3), []
    x = torch.ones(1, 3, requires_grad=True)
    out = checkpoint(module, x, use_reentrant=True)
    assert internals.is_reentrant_checkpoint(out.grad_fn)
    node = leaf_nodes(module)[0]
    node.register_prehook(lambda g: running.extend(internals.running_backwards()))
    out.sum().backward()
    assert len(running) >= 2


def test_a_callback_queued_twice_runs_after_one_queued_later():
    order = []

    def look(module):
        internals.at_end_of_backward(lambda: order.append("ours"))
        torch.autograd.Variable._execution_engine.queue_callback(lambda: order.append("later"))

    in_backward(look)
    assert order == ["later", "ours"]


def test_functorch_is_seen():
    seen = []
    torch.func.vmap(lambda x: (seen.append(internals.in_functorch()), x)[1])(torch.ones(2))
    assert seen == [True]
    assert not internals.in_functorch()


def test_a_tag_lives_as_long_as_its_node():
    out = nn.Linear(2, 2)(torch.ones(1, 2))
    internals.tags_of(out.grad_fn, "key").append(1)
    assert internals.tags_of(out.grad_fn, "key") == [1]


def test_one_region_of_autocast_has_one_cached_cast():
    assert internals.cached_cast("cpu") is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, again = internals.cached_cast("cpu"), internals.cached_cast("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        other = internals.cached_cast("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        assert internals.cached_cast("cpu") is None
    assert first is again
    assert first is not other


def test_modes_do_not_see_what_is_hidden_from_them():
    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Counter() as counter:
        torch.ones(2).add(1)
        with internals.dispatch_modes_off():
            torch.ones(2).add(1)
            internals.edge_of(nn.Parameter(torch.ones(1)))
        internals.edge_of(nn.Parameter(torch.ones(1)))
    assert counter.count <= 4  # two of the first line, ones and detach of the last


def test_hooks_that_pack_saved_tensors_are_seen():
    assert not internals.saved_tensor_hooks_active()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert internals.saved_tensor_hooks_active()


def test_a_module_compiled_by_its_own_method_has_another_call():
    module = nn.Linear(2, 2)
    assert internals.compiled_call(module) is None
    assert not internals.is_compiled(nn.Sequential(module))
    module.compile(backend="eager")
    assert internals.compiled_call(module) is not None
    assert internals.is_compiled(nn.Sequential(module))


@pytest.mark.filterwarnings("ignore")
def test_a_recompilation_under_the_stance_is_told_from_other_errors():
    compiled = torch.compile(lambda x: x * 2 + x.shape[0], backend="eager", dynamic=False)
    compiled(torch.ones(3))
    with internals.no_recompilation():
        compiled(torch.ones(3))
        with pytest.raises(Exception) as caught:  # noqa: PT011 - its type is private
            compiled(torch.ones(4))
    assert internals.is_recompilation(caught.value)
    assert not internals.is_recompilation(RuntimeError("out of memory"))


def test_calls_of_a_module_are_counted_on_the_stack():
    class Nested(nn.Module):
        def forward(self, depth):
            return self(depth - 1) if depth else internals.calls_in_progress(self)

    assert Nested()(2) == 3


@pytest.mark.usefixtures("world_of_one")
def test_a_collective_is_counted_and_can_be_stopped_before_it_is_issued():
    before = internals.collective_counts()
    dist.all_reduce(torch.ones(1))
    counted = internals.collective_counts()
    assert counted != before
    with (
        internals.NoCollectives(),
        pytest.raises(internals.CollectiveAttempted, match=r"allreduce.*test_torch_internals.py:"),
    ):
        dist.all_reduce(torch.ones(1))
    assert internals.collective_counts() == counted


def test_copies_of_a_hook_do_nothing_and_load_without_this_package():
    from sdcwatch.checks.captured import InertCopyHook

    hook = InertCopyHook(lambda *a: 1)
    assert hook() == 1
    assert copy.deepcopy(hook)("module", (), {}) is None
    pickled = pickle.dumps(hook)
    assert b"sdcwatch.checks" not in pickled
    assert pickle.loads(pickled)("module", (), {}, "out") is None

"""A micro-batch survives the journey bit for bit, and a damaged one is refused."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from sdcwatch.checks.payload import (
    AutocastState,
    MicroBatch,
    NotTransportable,
    PayloadDamaged,
    RngState,
    _relocate,
    clone_batch,
    faithful_clone,
    fingerprint_batch,
    join,
    join_losses,
    pack,
    shallow_copy,
    unpack,
)

CPU = torch.device("cpu")
Point = namedtuple("Point", ["x", "y"])


@dataclass
class Box:
    tensor: torch.Tensor
    name: str


class Encoding(UserDict):
    """Opaque to torch's pytree."""


class Stubborn:
    """Refuses to be copied and to be pickled."""

    def __copy__(self):
        raise TypeError

    def __reduce_ex__(self, protocol):
        msg = "no"
        raise TypeError(msg)


def micro_batch(batch=None, **fields):
    rng = RngState(torch.get_rng_state())
    return MicroBatch(batch, rng, AutocastState((("cpu", False, torch.bfloat16),), True), **fields)


def test_every_field_arrives_as_it_was_sent():
    sent = micro_batch(
        {"x": torch.randn(3), "box": Box(torch.arange(4), "four"), "none": None},
        grad_mode=False,
        training=(True, False),
        buffers=({"mean": torch.zeros(2)}, {"mean": torch.ones(2)}),
        loss_gradient=torch.tensor(0.5, dtype=torch.float16),
        calls=1,
        reentrant=True,
    )
    message = pack(sent)
    assert (message.dtype, message.dim(), message.is_contiguous()) == (torch.uint8, 1, True)
    came = unpack(message, CPU)
    assert torch.equal(came.batch["x"], sent.batch["x"])
    assert torch.equal(came.batch["box"].tensor, torch.arange(4))
    assert (came.batch["box"].name, came.batch["none"]) == ("four", None)
    assert torch.equal(came.rng.torch_cpu, sent.rng.torch_cpu)
    assert came.autocast == sent.autocast
    assert (came.grad_mode, came.training) == (False, (True, False))
    assert [state["mean"].tolist() for state in came.buffers] == [[0, 0], [1, 1]]
    assert came.loss_gradient.dtype is torch.float16
    assert (came.calls, came.reentrant) == (1, True)


def test_one_flipped_bit_anywhere_is_noticed():
    message = pack(micro_batch(torch.arange(64.0)))
    positions = [*range(64), *range(64, message.numel(), 37), message.numel() - 1]
    for position in positions:
        damaged = message.clone()
        damaged[position] ^= 1 << position % 8
        with pytest.raises(PayloadDamaged, match="Expected the bytes of a micro-batch"):
            unpack(damaged, CPU)
    assert torch.equal(unpack(message, CPU).batch, torch.arange(64.0))


@pytest.mark.parametrize("length", [0, 10, 100])
def test_a_message_that_was_cut_is_noticed(length):
    with pytest.raises(PayloadDamaged):
        unpack(pack(micro_batch(torch.arange(64.0)))[:length], CPU)


def test_a_message_with_a_tail_is_noticed():
    message = pack(micro_batch(torch.arange(64.0)))
    with pytest.raises(PayloadDamaged):
        unpack(torch.cat([message, torch.zeros(8, dtype=torch.uint8)]), CPU)


def test_a_view_of_a_large_tensor_travels_without_the_rest():
    large = torch.zeros(1 << 20)
    assert pack(micro_batch(large[5:50])).numel() < 20_000


def test_a_tensor_that_appears_twice_travels_once():
    once = torch.randn(1 << 14)
    came = unpack(pack(micro_batch([once, once])), CPU).batch
    assert came[0] is came[1]
    assert pack(micro_batch([once, once])).numel() < 1.5 * pack(micro_batch([once])).numel()


LAYOUTS = {
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(5, 7).t(),
    "columns of a wider one": torch.randn(6, 9)[:, :-1],
    "expanded": torch.randn(3, 1).expand(3, 5),
    "overlapping": torch.arange(9.0).as_strided((3, 4), (2, 1)),
    "unaligned": torch.randn(33)[3:],
    "0-dim": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "complex": torch.randn(4, dtype=torch.complex64).conj(),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.randn(8).bfloat16(),
    "sparse": torch.eye(4).to_sparse(),
    "leaf": torch.randn(3, requires_grad=True),
    "inside a graph": torch.randn(3, requires_grad=True) * 2,
}


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_values_strides_and_alignment_travel(tensor):
    for copied in (faithful_clone(tensor), unpack(pack(micro_batch(tensor)), CPU).batch):
        assert (copied.dtype, copied.layout) == (tensor.dtype, tensor.layout)
        assert torch.equal(
            copied.detach().to_dense() if copied.layout is not torch.strided else copied.detach(),
            tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach(),
        )
        assert copied.is_leaf
        assert copied.requires_grad == tensor.requires_grad
        if tensor.layout is torch.strided and tensor.numel():
            assert copied.stride() == tensor.stride()
            assert copied.data_ptr() % 64 == tensor.data_ptr() % 64


def test_one_column_of_a_wide_table_is_copied_compactly():
    column = torch.randn(500, 400)[:, 3]
    assert torch.equal(faithful_clone(column), column)
    assert faithful_clone(column).untyped_storage().nbytes() < 3000


def test_what_lay_on_an_accelerator_goes_to_the_receivers_device_and_the_rest_stays():
    memory = torch.arange(4, dtype=torch.uint8).untyped_storage()
    to_meta = _relocate(torch.device("meta"))
    assert to_meta(memory, "cpu").device.type == "cpu"
    assert to_meta(memory, "cuda:3").device.type == "meta"
    assert _relocate(CPU)(memory, "cuda:3").device.type == "cpu"


def test_a_batch_that_does_not_pickle_is_named():
    with pytest.raises(NotTransportable, match=r"Expected a batch that pickles.*audit_every=None"):
        pack(micro_batch({"function": lambda: None}))


def test_a_class_that_the_receiver_lacks_is_named_as_such(monkeypatch):
    message = pack(micro_batch(Box(torch.ones(1), "here")))
    monkeypatch.delattr(f"{__name__}.Box")
    with pytest.raises(NotTransportable, match="same program"):
        unpack(message, CPU)


def test_a_message_at_an_odd_address_is_read():
    message = pack(micro_batch(torch.arange(3)))
    shifted = torch.zeros(message.numel() + 3, dtype=torch.uint8)
    shifted[3:] = message
    assert torch.equal(unpack(shifted[3:], CPU).batch, torch.arange(3))


def test_a_shallow_copy_has_the_same_tensors_in_containers_of_its_own():
    x = torch.ones(2)
    batch = {
        "list": [x, {"deep": x}],
        "point": Point(x, [x]),
        "ordered": OrderedDict(x=x),
        "default": defaultdict(list, x=x),
        "box": Box(x, "b"),
        "encoding": Encoding(x=x),
        "tuple": (x, "text", 3),
        "stubborn": Stubborn(),
    }
    copied = shallow_copy(batch)
    assert copied["list"][0] is x
    assert copied["list"][1]["deep"] is x
    assert copied["point"].y[0] is x
    assert isinstance(copied["point"], Point)
    assert copied["stubborn"] is batch["stubborn"]
    batch["list"][1].clear()
    batch["point"].y.clear()
    batch["ordered"].clear()
    batch["default"].clear()
    batch["encoding"].clear()
    batch["box"].tensor = None
    assert copied["list"][1]["deep"] is x
    assert copied["point"].y == [x]
    assert copied["ordered"]["x"] is x
    assert copied["default"]["x"] is x
    assert copied["encoding"]["x"] is x
    assert copied["box"].tensor is x
    assert copied["tuple"] == (x, "text", 3)


def test_a_clone_shares_no_memory_and_keeps_opaque_objects_whole():
    batch = [Encoding(x=torch.ones(2)), Box(torch.zeros(2), "b")]
    copied = clone_batch(batch)
    batch[0]["x"].add_(1)
    batch[1].tensor.add_(1)
    assert torch.equal(copied[0]["x"], torch.ones(2))
    assert torch.equal(copied[1].tensor, torch.zeros(2))


CHANGES = {
    "a value": lambda b: b["x"][0].add_(1),
    "a sign of zero": lambda b: b["zero"].neg_(),
    "a number": lambda b: b.update(n=4),
    "a missing entry": lambda b: b.pop("x"),
    "a value inside of an object": lambda b: b["box"].tensor.mul_(3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_in_place_changes_the_fingerprint(change):
    batch = {"x": torch.ones(2, 3), "zero": torch.zeros(1), "n": 3, "box": Box(torch.ones(2), "b")}
    structure, digests = fingerprint_batch(batch)
    again, same = fingerprint_batch(copy.deepcopy(batch))
    assert again == structure
    assert torch.equal(same, digests)
    change(batch)
    after, other = fingerprint_batch(batch)
    assert after != structure or not torch.equal(other, digests)


def test_nested_tensors_travel():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    came = unpack(pack(micro_batch(nested)), CPU).batch
    assert [part.tolist() for part in came.unbind()] == [[1, 1], [0, 0, 0]]
    before = fingerprint_batch(nested)[1]
    nested.values()[4] = 1
    assert not torch.equal(fingerprint_batch(nested)[1], before)


def test_joined_micro_batches_keep_their_order():
    a, b, c = (micro_batch(name) for name in "abc")
    whole = join([join([a, b]), c])
    assert [part.batch for part in whole.parts] == ["a", "b", "c"]
    assert all(part.together == () for part in whole.parts)
    assert [part.batch for part in unpack(pack(whole), CPU).parts] == ["a", "b", "c"]
    assert [part.batch for part in a.parts] == ["a"]


def test_joined_losses_see_each_loss_and_their_order():
    one, two = (3, 2**64 - 1), (5, 2**63)
    assert join_losses([one]) == one
    joined = join_losses([one, two])
    assert joined not in (one, two, join_losses([two, one]))
    assert all(0 <= word < 2**64 for word in joined)

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sdcwatch.demo.model import GPT, GPTConfig, draw_batch, load_text


def test_the_model_is_small_and_ties_its_embeddings() -> None:
    model = GPT(GPTConfig())

    assert model.head.weight is model.token.weight
    assert 1_000_000 < sum(p.numel() for p in model.parameters()) < 2_000_000


def test_a_position_cannot_see_later_ones() -> None:
    model = GPT(GPTConfig(width=32, heads=2, layers=2)).eval()
    token_BT = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed_BT = token_BT.clone()
    changed_BT[0, 9] += 1

    mask_BT = torch.ones(1, 16)
    before, after = model(token_BT, mask_BT), model(changed_BT % 256, mask_BT)

    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_what_stands_at_a_masked_position_changes_nothing() -> None:
    model = GPT(GPTConfig(width=32, heads=2, layers=2)).eval()
    token_BT = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed_BT = token_BT.clone()
    changed_BT[0, 9] += 1
    mask_BT = torch.ones(1, 16)
    mask_BT[0, 9] = 0

    assert torch.equal(model(token_BT, mask_BT), model(changed_BT % 256, mask_BT))


def test_the_text_is_the_standard_library_in_a_fixed_order() -> None:
    text, again = load_text(limit_bytes=200_000), load_text(limit_bytes=200_000)

    assert torch.equal(text.train_N, again.train_N)
    assert len(text.train_N) + len(text.validation_N) == 200_000
    assert b"import " in bytes(text.train_N.tolist())
    assert text.files > 1


def test_folders_that_are_not_the_library_are_left_out(tmp_path: Path) -> None:
    for name in ("a.py", "pkg/b.py", "site-packages/c.py", "test/d.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name, encoding="utf-8")

    assert load_text(tmp_path).files == 2


def test_a_stripped_installation_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Expected Python sources below"):
        load_text(tmp_path)


def test_a_batch_depends_on_its_key_alone() -> None:
    bytes_N = load_text(limit_bytes=50_000).train_N
    first = draw_batch(bytes_N, batch=3, context=8, key=7)
    torch.manual_seed(99)
    again = draw_batch(bytes_N, batch=3, context=8, key=7)
    other = draw_batch(bytes_N, batch=3, context=8, key=8)

    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.token_BT, other.token_BT)
    assert torch.equal(first.token_BT[:, 1:], first.target_BT[:, :-1])

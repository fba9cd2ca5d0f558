"""The guard's own gloo group talks over the network that gloo is told to use."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from sdcwatch.config import gloo_interfaces
from sdcwatch.guard.exchange import lazy_group


def test_the_interfaces_of_the_environment_are_taken_as_torch_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value, names in (("", ()), ("eth0", ("eth0",)), ("eth0,ib7", ("eth0", "ib7"))):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
        assert gloo_interfaces() == names
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert gloo_interfaces() == ()


def test_the_group_is_made_on_the_interface_that_gloo_is_told_to_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> None:
        lazy_group(dist.HashStore(), 0, 1, timedelta(seconds=5))

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    make()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent7")
    with pytest.raises(RuntimeError, match="absent7"):
        make()

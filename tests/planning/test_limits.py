"""Amounts of memory, read and refused."""

import pytest
import torch

from lightning_pipeoffload.planning.limits import device_limit, parse_bytes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1024, 1024),
        ("1024", 1024),
        ("40GiB", 40 << 30),
        ("1.5 MiB", 3 << 19),
        ("2GB", 2_000_000_000),
        ("7 B", 7),
    ],
)
def test_an_amount_is_read(value, expected):
    assert parse_bytes(value) == expected


@pytest.mark.parametrize("value", [0, -1, "40 gigs", "GiB", "", "1..5GiB", "0GiB", True])
def test_what_is_no_amount_is_refused(value):
    with pytest.raises(ValueError, match="is no amount of memory; use bytes"):
        parse_bytes(value)


def test_a_device_has_left_what_others_than_activations_do_not_take(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (600, 1024))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 400)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 500)
    assert device_limit(torch.device("cuda"), activation_bytes=300) == 900 - 200
    assert device_limit(torch.device("cpu"), activation_bytes=300) is None

"""The rates and memory of devices by their data sheets, for plans without measurements.

Sources: NVIDIA's data sheets of the forms with NVLink (SXM), without sparsity, which doubles what
they print large. H100: 989 TFLOP/s dense bf16 and fp16, 67 fp32, 67 fp64 in tensor cores, 80 GB,
NVLink 900 GB/s both ways together, PCIe gen 5 of 16 lanes. H200: the same with 141 GB. A100: 312,
19.5 and 19.5 TFLOP/s, 80 GB, NVLink 600 GB/s, PCIe gen 4. RTX 4090: 165 TFLOP/s dense bf16 and fp16
with sums in float32, 330 fp16 with sums in float16, 82.6 fp32, 1.3 fp64, 24 GiB, PCIe gen 4, which
is its link as well. RTX 3090: 71 TFLOP/s with sums in float32, 142 in float16, 35.6 fp32, 0.56
fp64, 24 GiB, the same link; RTX 3060: 25.5, 51, 12.7 and 0.2, 12 GiB. A host's memory is that of
two sockets with eight channels each, DDR4-3200 with an A100 or RTX card and DDR5-4800 with an
H100 or H200, which eight devices share. Between machines each device has a network card: 400 Gbit/s
with an H100 or H200, 200 with an A100, 100 with an RTX card.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from lightning_pipeoffload.planning.limits import parse_bytes
from lightning_pipeoffload.schedule import ScheduleError


class Device(NamedTuple):
    """The peak rates of a device.

    Attributes:
        name: Its name on the command line.
        flops: Operations per second, by the kind of number.
        memory: Bytes.
        copy_rate: Bytes per second to the host, and as many back at the same time.
        link_rate: Bytes per second to a neighbour in its machine.
        network_rate: Bytes per second to one in another machine.
        host_rate: Bytes per second of the host's memory, which its devices share.
    """

    name: str
    flops: dict[str, float]
    memory: float
    copy_rate: float
    link_rate: float
    network_rate: float
    host_rate: float


FP16_SUMS = "fp16 with sums in float16"
"""The kind of product in float16 whose sums are in float16 too, not in float32."""

_HOPPER = {"bf16": 989e12, "fp16": 989e12, FP16_SUMS: 989e12, "fp32": 67e12, "fp64": 67e12}
_ADA = {"bf16": 165.2e12, "fp16": 165.2e12, FP16_SUMS: 330.3e12, "fp32": 82.6e12, "fp64": 1.3e12}
_GA102 = {"bf16": 71e12, "fp16": 71e12, FP16_SUMS: 142e12, "fp32": 35.6e12, "fp64": 0.56e12}
_GA106 = {"bf16": 25.5e12, "fp16": 25.5e12, FP16_SUMS: 51e12, "fp32": 12.7e12, "fp64": 0.2e12}
_AMPERE = {"bf16": 312e12, "fp16": 312e12, FP16_SUMS: 312e12, "fp32": 19.5e12, "fp64": 19.5e12}

DEVICES = {
    device.name: device
    for device in (
        Device("3060", _GA106, 12 * 2**30, 32e9, 32e9, 12.5e9, 410e9 / 8),
        Device("3090", _GA102, 24 * 2**30, 32e9, 32e9, 12.5e9, 410e9 / 8),
        Device("4090", _ADA, 24 * 2**30, 32e9, 32e9, 12.5e9, 410e9 / 8),
        Device("a100", _AMPERE, 80e9, 32e9, 300e9, 25e9, 410e9 / 8),
        Device("h100", _HOPPER, 80e9, 64e9, 450e9, 50e9, 614e9 / 8),
        Device("h200", _HOPPER, 141e9, 64e9, 450e9, 50e9, 614e9 / 8),
    )
}


def device_named(name: Any, efficiency: Any, **rates: Any) -> Device:
    """Return a device with ``efficiency``, a share, of its peak rates.

    Args:
        name: One of ``DEVICES``.
        efficiency: The share.
        **rates: ``host_bandwidth``, ``link`` and ``network``: bytes per second, such as ``50GB``,
            in place of the data sheet's; None: the data sheet's.

    Raises:
        ScheduleError: There is no such device, or the share is none.
        ValueError: A rate is none.
    """
    device = DEVICES.get(str(name).lower().removeprefix("rtx"))
    if device is None:
        raise ScheduleError(
            f"device ({name}) is unknown; use one of {', '.join(DEVICES)}, or give costs that "
            f"pipeoffload-rehearse has measured: costs_file=FILE"
        )
    is_number = isinstance(efficiency, (int, float)) and not isinstance(efficiency, bool)
    if not is_number or not 0 < efficiency < inf or efficiency > 1:
        raise ScheduleError(f"efficiency ({efficiency}) must be a share above 0 and up to 1")
    fields = {"host_bandwidth": "host_rate", "link": "link_rate", "network": "network_rate"}
    new_rates: dict[str, Any] = {
        fields[n]: parse_bytes(rate, n, is_rate=True)
        for n, rate in rates.items()
        if rate is not None
    }
    device = device._replace(**new_rates)
    return device._replace(
        flops={kind: rate * efficiency for kind, rate in device.flops.items()},
        copy_rate=device.copy_rate * efficiency,
        link_rate=device.link_rate * efficiency,
        network_rate=device.network_rate * efficiency,
        host_rate=device.host_rate * efficiency,
    )


def merge_devices(devices: Sequence[Device]) -> Device:
    """Return one device for unlike ones: the rates of the fastest products, the slowest links."""
    names = [device.name for device in devices]
    kinds = devices[0].flops
    return Device(
        ", ".join(names) if len({*names}) > 1 else names[0],
        {kind: max(device.flops[kind] for device in devices) for kind in kinds},
        *(min(rates) for rates in zip(*(device[2:] for device in devices), strict=True)),
    )


def matmul_kind(device: Device, precision: str, has_float16_sums: bool) -> str:
    """Return the kind of product, by the trainer's precision and ``float16_sums``.

    Raises:
        ScheduleError: Sums in float16 are asked for, and there are none, or they are no faster.
    """
    kind = kind_of_precision(precision)
    if not has_float16_sums:
        return kind
    if kind != "fp16":
        raise ScheduleError(
            f"float16_sums is for products in float16, and precision is {precision}: add "
            f"+trainer.precision=16-mixed, or leave it out"
        )
    if device.flops[FP16_SUMS] == device.flops[kind]:
        raise ScheduleError(
            f"float16_sums changes nothing for device={device.name}, which adds up in float32 at "
            f"the same rate; leave it out"
        )
    return FP16_SUMS


def kind_of_precision(precision: str) -> str:
    """Return the kind of number in which a trainer's precision multiplies matrices."""
    # "transformer-engine-float16" is of the same rate where there is one.
    kinds = {"bf16": "bf16", "16": "fp16", "transformer": "bf16", "64": "fp64"}
    return kinds.get(precision.partition("-")[0], "fp32")

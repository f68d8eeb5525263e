"""Values of any type as bytes for another rank: tensors without their graph and their storage."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_pipeoffload.runtime.message_links import as_bytes
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly

MOST_BYTES = 2**28


class UnsendableError(Exception):
    """A value cannot be sent; says why."""


def pack(value: Any, room: int = MOST_BYTES) -> bytes:
    """Return a value as bytes.

    Args:
        value: The value.
        room: The most bytes that it may take.

    Raises:
        UnsendableError: It takes more, or cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _Packer(file, room).dump(value)
    except UnsendableError:
        raise
    except Exception as error:  # whatever the pickling of a user's class raises
        raise UnsendableError(f"it cannot be pickled: {error}") from error
    if file.tell() > room:
        raise UnsendableError(_too_large())
    return file.getvalue()


def unpack(data: bytes, device: torch.device) -> Any:
    """Return the value; what was on a device is on this one."""
    with torch.inference_mode(False):  # training may write into what validation sends
        return _Unpacker(io.BytesIO(data), device).load()


def _too_large() -> str:
    return f"what steps have collected takes more than {MOST_BYTES >> 20} MiB"


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, room: int) -> None:
        super().__init__(file)
        self._room = room

    @override
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        if isinstance(obj, ShapeOnly):
            raise UnsendableError("several stages have a part of it each")
        self._room -= obj.nbytes
        if self._room < 0:
            raise UnsendableError(_too_large())
        if type(obj) not in (Tensor, nn.Parameter) or obj.layout is not torch.strided:
            return None  # pickles itself
        data = as_bytes(obj.detach().cpu().contiguous()).numpy().tobytes()
        return data, obj.dtype, tuple(obj.shape), obj.device.type != "cpu"


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    @override
    def persistent_load(self, pid: Any) -> Tensor:
        data, dtype, shape, is_on_device = pid
        made = torch.empty(shape, dtype=dtype)
        if data:
            made.copy_(torch.frombuffer(bytearray(data), dtype=dtype).view(shape))
        return made.to(self._device) if is_on_device else made

"""Values that are sent to other ranks as bytes, and placeholders for those that are not."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_pipeoffload.runtime.comm import as_bytes
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.runtime.users_code import Placeholder

MOST_BYTES = 2**28


class VariableState(NamedTuple):
    """One rank's state of one variable.

    Attributes:
        end: The last segment of the step that the rank runs; None: it has no value.
        num_leaves: The number of leaves of the value.
        is_whole: Whether the rank has all of these.
        kind: The kind of step that writes a variable which no trace has; "" for the others.
    """

    end: int | None
    num_leaves: int
    is_whole: bool
    kind: str


def choose_sender(reports: Mapping[int, VariableState]) -> int:
    """Return the rank that has all of a variable; -1 if none has."""
    having = {rank: r for rank, r in reports.items() if r.end is not None}
    if not having:
        return -1
    # The rank that runs most of the step has run every line; some values may be on others.
    last = max(having, key=lambda rank: having[rank].end or 0)
    whole = [r for r, report in having.items() if report.is_whole]
    same = [r for r in whole if having[r].num_leaves == having[last].num_leaves]
    return last if last in whole else max(same, default=-1)


class UnsendableError(Exception):
    """The reason why a value cannot be sent."""


def pack(value: Any, room: int = MOST_BYTES) -> bytes:
    """Return a value as bytes, without graph and storage.

    Raises:
        UnsendableError: It takes more than ``room`` bytes, or cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _Packer(file, room).dump(value)
    except UnsendableError:
        raise
    except Exception as error:  # whatever the pickling of a user's class raises
        raise UnsendableError(f"it cannot be pickled: {error}") from error
    if file.tell() > room:
        raise UnsendableError(_too_large_message())
    return file.getvalue()


def unpack(data: bytes, device: torch.device) -> Any:
    """Return the value; its accelerator tensors are on ``device``."""
    with torch.inference_mode(False):  # training may write into what validation sends
        return _Unpacker(io.BytesIO(data), device).load()


def _too_large_message() -> str:
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
            raise UnsendableError("each of several stages has some of it")
        self._room -= obj.nbytes
        if self._room < 0:
            raise UnsendableError(_too_large_message())
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
        tensor = torch.empty(shape, dtype=dtype)
        if data:
            tensor.copy_(torch.frombuffer(bytearray(data), dtype=dtype).view(shape))
        return tensor.to(self._device) if is_on_device else tensor


class RemoteOutputs(Placeholder, dict[str, Any]):
    """What a step returned, on a rank that does not run the last stage.

    The numbers in it are sent to all ranks; reading anything else raises ``RuntimeError``.
    """

    def __init__(self, kind: str, root: int, fetch: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self.message = (
            f"of what {kind} returns, only numbers are on every rank; the rest is on global rank "
            f"{root}. Use self.log in {kind} and trainer.callback_metrics here, or keep it in an "
            f"attribute for a hook of the epoch's end"
        )
        self._fetch = fetch

    def __getitem__(self, key: str) -> Any:
        """Return a number, or raise ``RuntimeError`` for any other value."""
        numbers = self._fetch()
        return numbers[key] if key in numbers else self._raise()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a number, as ``[key]`` does."""
        return self[key]

    def __bool__(self) -> bool:
        return True

    __reduce_ex__ = keys = values = items = copy = Placeholder.__call__  # which raises


def numbers_in(outputs: Any) -> dict[str, Any]:
    """Return the numbers in a step's output, by name; a tensor alone is the loss."""
    named = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
    return {name: value for name, value in named.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, Tensor) and value.dim() == 0)

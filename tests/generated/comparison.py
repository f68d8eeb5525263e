"""Compares what a program leaves on one device and on its ranks."""

from collections.abc import Mapping
from pathlib import Path

import torch

_TOLERANCES = {"64-true": 1e-9, "32-true": 2e-4, "bf16-mixed": 3e-2}
# What names versions and places, or is the strategy's own.
_LEFT_OUT = ("pytorch-lightning_version", "dirpath", "kth_best_model_path", "pipeoffload")


def differences(found, expected, precision, folders):
    """Return lines that say what differs between two trees of values.

    Args:
        found: Of the ranks.
        expected: Of one device.
        precision: That of the trainer.
        folders: Where each has saved; paths are compared below them.
    """
    lines = []
    _compare("", found, expected, _TOLERANCES[precision], folders, lines)
    return lines


def checkpoints(folder):
    """Return the entries of all checkpoints that a program has written."""
    paths = sorted(Path(folder).rglob("*.ckpt"))
    files = [path for path in paths if path.is_file()]
    folders = [str(path.relative_to(folder)) for path in paths if path.is_dir()]
    loaded = {
        f"checkpoint {path.relative_to(folder)}": torch.load(path, weights_only=False)
        for path in files
    }
    return loaded, folders


def _compare(name, found, expected, tolerance, folders, lines):
    found, expected = _plain(found, folders[0]), _plain(expected, folders[1])
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted({*found, *expected}, key=str):
            if str(key).startswith(_LEFT_OUT):
                continue
            path = f"{name}[{key!r}]" if name else str(key)
            if key not in found or key not in expected:
                where = "one device" if key in expected else "the ranks"
                lines.append(f"{path} is there on {where} only")
                continue
            _compare(path, found[key], expected[key], tolerance, folders, lines)
    elif isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            lines.append(f"{name} has {len(found)} entries, and {len(expected)} on one device")
            return
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            _compare(f"{name}[{index}]", one, other, tolerance, folders, lines)
    elif not _is_equal(found, expected, tolerance):
        lines.append(f"{name} is {_short(found)}, and {_short(expected)} on one device")


def _plain(value, folder):
    if isinstance(value, str):
        return value.replace(str(folder), "")
    if isinstance(value, Mapping):
        return {_plain(key, folder): entry for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _is_equal(found, expected, tolerance):
    numbers = (int, float, torch.Tensor)
    if isinstance(found, numbers) and isinstance(expected, numbers):
        found, expected = torch.as_tensor(found), torch.as_tensor(expected)
        if found.shape != expected.shape:
            return False
        found, expected = found.double(), expected.double()
        if _is_float32(found) and _is_float32(expected):  # as torchmetrics' states are
            tolerance = max(tolerance, 1e-6)
        return torch.allclose(found, expected, tolerance, tolerance, equal_nan=True)
    return type(found) is type(expected) and (
        found == expected if isinstance(found, str | bytes | type(None)) else True
    )


def _is_float32(value):
    return torch.equal(value.float().double(), value)


def _short(value):
    text = repr(value.tolist() if isinstance(value, torch.Tensor) else value)
    return text if len(text) < 200 else text[:200] + " ..."

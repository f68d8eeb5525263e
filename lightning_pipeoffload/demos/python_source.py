"""Real text without a download: the source files of the running Python's standard library.

About 10 MB, read in a fraction of a second. Whole files go to training or to validation, by a hash
of their path: the split is the same on every machine with the same Python.
"""

import hashlib
import os
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Sample = tuple[Tensor, Tensor]
# Installed packages are not the standard library; tests and tables repeat themselves.
SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data"),
}


class Windows(Dataset[Sample]):
    """Pieces of a text, each with the same piece one byte later as its target.

    Args:
        text: The bytes, ``[length]`` of uint8.
        context: Bytes of one piece.
        num_windows: How many pieces, spread evenly; None: as many as fit without overlap.

    Raises:
        ValueError: If the text is too short for one piece.
    """

    def __init__(self, text: Tensor, context: int, num_windows: int | None = None) -> None:
        if len(text) <= context:
            raise ValueError(f"context ({context}) must be less than the text's {len(text)} bytes")
        self.text = text
        self.context = context
        self.num_windows = num_windows or (len(text) - 1) // context

    def __len__(self) -> int:
        return self.num_windows

    def __getitem__(self, index: int) -> Sample:
        """Return inputs and targets, each ``[context]`` of int64."""
        start = index * (len(self.text) - 1 - self.context) // max(1, self.num_windows - 1)
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class PythonSource(LightningDataModule):
    """Batches ``(inputs, targets)`` of Python source, each ``[batch_size, context]`` of int64.

    Args:
        context: Bytes of one sequence.
        batch_size: Sequences of one batch.
        num_val_windows: Sequences of the validation set, spread evenly over its files; None: all.

    Raises:
        ValueError: If ``context`` or ``batch_size`` is not positive.
    """

    def __init__(
        self, context: int = 128, batch_size: int = 16, num_val_windows: int | None = None
    ) -> None:
        super().__init__()
        for name, size in (("context", context), ("batch_size", batch_size)):
            if size < 1:
                raise ValueError(f"{name} ({size}) must be at least 1")
        self.context = context
        self.batch_size = batch_size
        self.num_val_windows = num_val_windows

    def setup(self, stage: str) -> None:
        """Read the files; every process has them, so there is nothing to prepare on one of them."""
        train_files, val_files = split_files(find_source_files())
        self.train_windows = Windows(read_text(train_files), self.context)
        self.val_windows = Windows(read_text(val_files), self.context, self.num_val_windows)

    def train_dataloader(self) -> DataLoader[Sample]:
        """Return the training batches in a new order every epoch."""
        return DataLoader(self.train_windows, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Sample]:
        """Return the validation batches in the order of the files."""
        return DataLoader(self.val_windows, self.batch_size)

    def test_dataloader(self) -> DataLoader[Sample]:
        """Return the validation batches, which nothing was trained on."""
        return self.val_dataloader()


def find_source_files() -> list[Path]:
    """Return the standard library's source files, sorted.

    Raises:
        FileNotFoundError: If this Python was installed without its sources.
    """
    paths = []
    for folder, folders, files in os.walk(standard_library()):
        folders[:] = {*folders} - SKIPPED_FOLDERS
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    if not paths:
        root = standard_library()
        raise FileNotFoundError(f"no Python sources under {root}: this Python has none installed")
    return sorted(paths, key=Path.as_posix)


def standard_library() -> Path:
    """Return the folder of the running Python's standard library, a venv's base included."""
    return Path(sysconfig.get_path("stdlib"))


def split_files(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Split files into training and validation, about nine to one.

    A hash of its path decides for each file, so none moves when others come or go.
    """
    root = standard_library()
    parts: tuple[list[Path], list[Path]] = [], []
    for path in files:
        name = path.relative_to(root).as_posix()
        parts[hashlib.sha256(name.encode()).digest()[0] % 10 == 0].append(path)
    return parts


def read_text(files: list[Path]) -> Tensor:
    """Return the bytes of all files, one after another: ``[length]`` of uint8."""
    text = bytearray().join(path.read_bytes() for path in files)
    return torch.frombuffer(text, dtype=torch.uint8)

"""The ``.metadata`` of a checkpoint folder, read without running what may be in it.

torch pickles it. Unpickling imports and calls whatever the file names, so it is read by the names
that such a file has and no other.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (  # type: ignore[attr-defined] # exported at run time
    FileSystemReader,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from typing_extensions import override

METADATA_FILE = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        "_MEM_FORMAT_ENCODING",
    },
    # Where torch had two of them before.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},  # returns one of torch's layouts by its name
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


class MetadataReader(FileSystemReader):
    """Reads a checkpoint folder; its ``.metadata`` as data."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read what is in the folder.

        Raises:
            ValueError: The file holds something else.
        """
        metadata = _read(Path(self.path) / METADATA_FILE)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # as torch's own reader does
        return metadata


def _read(path: Path) -> Metadata:
    with path.open("rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except pickle.UnpicklingError as error:
            raise ValueError(f"the checkpoint's {path} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"the checkpoint's {path} holds a {type(metadata).__name__}, no Metadata")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of a ``.metadata``."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(
                f"it wants {module}.{name}, which no metadata needs, and code in it might run; "
                f"load checkpoints that you trust"
            )
        return super().find_class(module, name)

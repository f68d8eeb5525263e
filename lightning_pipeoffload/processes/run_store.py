"""The store that every rank of a run can write to and read, each by its own connection."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined] # exported at run time
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.constants import default_pg_timeout


def connect_store(run: str, timeout: timedelta | None) -> Store:
    """Open another connection to the store that the process group was made with.

    Args:
        run: A name of this run; one process group may see several.
        timeout: How long to wait for a key that another rank sets.
    """
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timeout or default_pg_timeout,
    )
    return PrefixStore(f"pipeoffload/{run}", store)

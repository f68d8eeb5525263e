"""Folders of caches, so that no run chooses as another one has."""

import os
from uuid import uuid4

NAME = "-caches"


def new_caches():
    """Return a folder of the session's that nothing has used."""
    session = os.environ["XDG_CACHE_HOME"].partition(NAME)[0] + NAME
    return f"{session}/{uuid4().hex}"

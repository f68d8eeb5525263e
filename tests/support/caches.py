"""Folders of caches, so that no run chooses as another one has."""

import os
import tempfile
from uuid import uuid4

NAME = "-caches"


def begin_session():
    """Make the session's folder, for its processes too; return it, to be deleted at the end."""
    os.environ["XDG_CACHE_HOME"] = folder = tempfile.mkdtemp(NAME)
    return folder


def new_caches():
    """Return a folder of the session's that nothing has used."""
    session = os.environ["XDG_CACHE_HOME"].partition(NAME)[0] + NAME
    return f"{session}/{uuid4().hex}"

import contextlib
import functools
import random
from types import SimpleNamespace

import lightning as L
import pytest
import torch

import lightning_pipeoffload
from lightning_pipeoffload.loop.hooks import users_hooks
from lightning_pipeoffload.runtime.users_code.users_lines import (
    is_librarys_file,
    is_opaque,
    is_users,
    is_users_file,
)


class Mine:
    pass


@pytest.mark.parametrize("module", [torch, L, random, lightning_pipeoffload, users_hooks])
def test_libraries_python_and_this_package_are_not_the_users(module):
    assert not is_users(module.__name__)
    assert not is_users_file(module.__file__)


def test_all_else_is_the_users_and_so_is_what_a_notebook_runs():
    assert is_users(__name__)
    assert is_users("__main__")
    assert is_users_file(__file__)
    assert is_users_file("<ipython-input-3-0123456789ab>")
    assert not is_users("a.module.that.nobody.imported")


def test_python_is_no_library():
    assert is_librarys_file(torch.__file__)
    assert is_librarys_file(users_hooks.__file__)
    assert not is_librarys_file(contextlib.__file__)


@pytest.mark.parametrize("value", [torch.Generator(), ValueError(), functools.partial(print)])
def test_what_libraries_have_for_themselves_is_not_looked_into(value):
    assert is_opaque(value)
    assert not is_opaque(Mine())
    assert not is_opaque(SimpleNamespace())

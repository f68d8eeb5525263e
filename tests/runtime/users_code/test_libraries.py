import contextlib
import functools
import json
import random
import sys
from types import ModuleType, SimpleNamespace

import lightning as L
import pytest
import torch
import torchmetrics

import lightning_pipeoffload
from lightning_pipeoffload.loop.hooks import users_hooks
from lightning_pipeoffload.runtime.users_code.libraries import (
    is_foundations,
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


@pytest.mark.parametrize("module", [torch.nn, L.pytorch, torchmetrics, json, sys, users_hooks])
def test_every_run_stands_on_these(module):
    assert is_foundations(module.__name__)


def test_a_file_of_the_users_may_be_called_as_one_of_pythons(monkeypatch, tmp_path):
    mine = ModuleType("queue")
    mine.__file__ = str(tmp_path / "queue.py")
    assert is_foundations("queue")
    monkeypatch.setitem(sys.modules, "queue", mine)
    is_users.cache_clear()
    try:
        assert not is_foundations("queue")
    finally:
        is_users.cache_clear()
    assert not is_foundations("pytest")


@pytest.mark.parametrize("value", [torch.Generator(), ValueError(), functools.partial(print)])
def test_what_libraries_have_for_themselves_is_not_looked_into(value):
    assert is_opaque(value)
    assert not is_opaque(Mine())
    assert not is_opaque(SimpleNamespace())


def test_what_draws_may_be_in_an_object_of_torchs():
    sampler = torch.utils.data.RandomSampler([1])
    assert is_opaque(sampler)
    assert not is_opaque(sampler, may_draw=True)

"""Several contexts entered as one: what ends them, as if they were nested."""

from contextlib import contextmanager

import pytest

from lightning_pipeoffload.runtime import NOTHING, combine_contexts


@contextmanager
def context(name, seen, fails_at="", handles=False):
    if fails_at == "enter":
        raise KeyError(name)
    seen.append(f"enter {name}")
    try:
        yield
    except Exception as error:
        seen.append(f"{type(error).__name__} in {name}")
        if not handles:
            raise
    else:
        seen.append(f"exit {name}")
    if fails_at == "exit":
        raise KeyError(name)


def run(*contexts, fails=False):
    with combine_contexts(*contexts):
        if fails:
            raise OSError


def test_what_does_nothing_is_left_out():
    seen = []
    only = context("a", seen)
    assert combine_contexts(NOTHING, only, NOTHING) is only
    assert combine_contexts(NOTHING, NOTHING) is NOTHING


def test_they_end_in_reverse_order():
    seen = []
    run(context("a", seen), NOTHING, context("b", seen), context("c", seen))
    assert seen == ["enter a", "enter b", "enter c", "exit c", "exit b", "exit a"]


@pytest.mark.parametrize("fails_at", ["enter", "exit"])
def test_the_outer_ones_end_with_the_error_of_an_inner_one(fails_at):
    seen = []
    with pytest.raises(KeyError):
        run(context("a", seen), context("b", seen), context("c", seen, fails_at))
    assert seen[-2:] == ["KeyError in b", "KeyError in a"]


def test_an_error_that_one_handles_is_none_for_the_outer_ones():
    seen = []
    run(context("a", seen), context("b", seen, handles=True), context("c", seen), fails=True)
    assert seen[-3:] == ["OSError in c", "OSError in b", "exit a"]

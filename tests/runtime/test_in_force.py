"""What the run of a step says is heard wherever torch calls, until it is over."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_pipeoffload.runtime.in_force import InForce


def test_the_last_of_a_kind_holds():
    found = InForce()
    with found.during("outer"), found.during(1):
        with found.during("inner"):
            assert (found.latest(str), found.latest(int)) == ("inner", 1)
        assert found.latest(str) == "outer"
    assert (found.latest(str), found.latest(int)) == (None, None)


def test_it_holds_in_autograds_threads_too():
    found = InForce()
    with found.during("said"), ThreadPoolExecutor(1) as thread:
        assert thread.submit(found.latest, str).result() == "said"


def test_a_step_that_fails_leaves_nothing():
    found = InForce()
    with pytest.raises(KeyError), found.during("said"):
        raise KeyError
    assert found.latest(str) is None

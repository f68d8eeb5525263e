from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_pipeoffload.runtime.active_settings import ActiveSettings


def test_the_latest_of_a_kind_holds_in_all_threads_until_it_ends_or_fails():
    found = ActiveSettings()
    with found.during("outer"), found.during(1), ThreadPoolExecutor(1) as thread:
        with found.during("inner"):
            assert thread.submit(found.latest, str).result() == "inner"
        with pytest.raises(KeyError), found.during("failing"):
            raise KeyError
        assert (found.latest(str), found.latest(int)) == ("outer", 1)
    assert (found.latest(str), found.latest(int)) == (None, None)

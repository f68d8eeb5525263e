"""Plans are as they were: a change of a figure is a decision, and the table's diff shows it."""

import pytest

from tests.support import golden_plans

SLOW = [setting for setting in golden_plans.SETTINGS if not golden_plans.is_quick(setting)]
QUICK = [setting for setting in golden_plans.SETTINGS if golden_plans.is_quick(setting)]


@pytest.mark.parametrize("settings", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_period_makespan_and_peaks_are_those_of_the_table(settings):
    """Where they are meant to change: ``python -m tests.support.golden_plans``."""
    table = golden_plans.read()
    assert table.keys() == {*golden_plans.SETTINGS}
    assert [golden_plans.row(setting) for setting in settings] == [table[s] for s in settings]

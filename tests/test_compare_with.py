"""What the comparison with a commit reads and says; its trainings are those of other tests."""

import io

import torch
from rich.console import Console
from rich.table import Table

from tests.support.compare_with import changed, differences, figures
from tests.support.step_digests import digest


def printed(first, second):
    table = Table("schedule", "a head of\nlines", "ms")
    table.add_row("1f1b", first, "8")
    table.add_row("zb_h1", second, "")
    Console(file=(file := io.StringIO()), width=60).print(table)
    return figures(file.getvalue())


def test_figures_that_change_by_more_than_the_bound_are_shown():
    base, mine = printed("10.0", "20.0"), printed("10.2", "21.0")
    assert base == {"1f1b, a head of lines": 10, "1f1b, ms": 8, "zb_h1, a head of lines": 20}
    assert changed([base] * 3, [mine] * 3) == ["zb_h1, a head of lines: 20 -> 21 (1.050)"]


def test_trainings_that_differ_in_a_bit_or_are_in_one_tree_only_are_named():
    weights = torch.ones(2)
    base = {"same": digest({"a": weights}), "bit": digest(weights), "old": "1"}
    weights[0] = weights[0].nextafter(torch.tensor(2.0))
    mine = {"same": digest({"a": torch.ones(2)}), "bit": digest(weights), "new": "2"}
    found = differences(base, mine)
    assert [line.split(":")[0] for line in found] == ["bit", "new", "old"]

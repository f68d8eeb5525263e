import json
import random
import sys

import pytest

from lightning_pipeoffload.cli import minibatch_balance
from lightning_pipeoffload.cli.minibatch_balance import compute_balances, sample_lengths
from lightning_pipeoffload.texts.packing import COSTS


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["pipeoffload-odc", *arguments])
        status = 0
        try:
            minibatch_balance.main()
        except SystemExit as done:
            status = done.code
        return status, *capsys.readouterr()

    return call


def test_figures_of_a_file_of_lengths(run, tmp_path):
    (tmp_path / "lengths.txt").write_text("9\n1\n1\n1\n" * 4)
    given = (f"lengths={tmp_path}/lengths.txt", "num_ranks=2", "samples_per_rank=2", "cost=tokens")
    status, out, _ = run(*given, "format=json")
    ways = {(row["communication"], row["mode"]): row for row in json.loads(out)["ways"]}
    assert status == 0
    assert ways["on demand", "lb_mini"]["time"] == 36.0  # the long text alone, three against it
    assert ways["on demand", "lb_mini"]["speedup"] >= 1.0
    assert run(*given)[1].count("on demand") == 3


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_first_minibatch_is_drawn(run, tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    assert run("drawn.texts=64", f"picture={path}")[0] == 0
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("lengths=nowhere", "lengths (nowhere) must be a file"),
        ("num_ranks=0", "num_ranks (0) must be a whole number from 1 on"),
        ("samples_per_rank=x", "samples_per_rank (x) must be a whole number from 1 on"),
        ("drawn.sigma=x", "drawn.sigma (x) must be a number"),
        ("cost=3b", "cost='3b' must be one of"),
        ("max_tokens=10", "max_tokens=10 is the most of a microbatch"),
        ("format=xml", "format (xml) must be text or json"),
        ("picture=a.gif", "picture (a.gif) must be an .svg or a .png"),
        ("picture=nowhere/a.svg", "cannot be written: make the folder nowhere first"),
        ("drawn.texts=2.5", "drawn.texts (2.5) must be a whole number from 1 on"),
        ("drawn.mean=0", "drawn.mean (0) must be a number above 0"),
        ("drawn.texts=3", "3 texts make no minibatch of 8 ranks"),
    ],
)
def test_what_cannot_be_is_one_line(run, argument, message):
    status, _, error = run("drawn.texts=64", argument) if argument[:5] != "drawn" else run(argument)
    assert status == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1


LONGEST = 65536


def speedups(samples_per_rank, cost, minibatches=40, num_ranks=8):
    texts = num_ranks * samples_per_rank * minibatches
    lengths = sample_lengths(texts, 16500, 0.8, LONGEST, seed=1)
    found = compute_balances(lengths, num_ranks, samples_per_rank, LONGEST, COSTS[cost])
    return {(one.communication, one.mode): one for one in found}


@pytest.mark.parametrize(
    ("samples", "least", "cost"), [(4, 1.20, "1.5b"), (4, 1.20, "7b"), (8, 1.25, "1.5b")]
)
def test_on_demand_gains_with_more_texts_than_one_each(samples, least, cost):
    found = speedups(1, cost)
    assert found["on demand", "lb_mini"].speedup == pytest.approx(1.0, abs=0.01)
    found = speedups(samples, cost, 64 // samples)
    assert found["on demand", "lb_mini"].speedup >= least
    assert found["on demand", "lb_mini"].speedup >= found["on demand", "lb_micro"].speedup
    assert found["on demand", "lb_mini"].idle < found["collective", "lb_micro"].idle


def test_lb_mini_is_never_below_lb_micro_in_any_minibatch():
    draws = random.Random(3)
    for _ in range(60):
        ranks, samples = draws.randint(1, 9), draws.randint(1, 6)
        lengths = sample_lengths(ranks * samples, 900, 1.0, 8000, draws.randrange(1000))
        found = compute_balances(lengths, ranks, samples, 8000, draws.choice(list(COSTS.values())))
        by_mode = {one.mode: one.time for one in found if one.communication == "on demand"}
        assert by_mode["lb_mini"] <= by_mode["lb_micro"] * (1 + 1e-12)
        assert all(-1e-12 <= one.idle < 1 for one in found)


def test_too_few_texts_are_refused():
    with pytest.raises(ValueError, match="3 texts make no minibatch of 2 ranks with 2 each"):
        compute_balances([1, 2, 3], 2, 2, 10, COSTS["tokens"])

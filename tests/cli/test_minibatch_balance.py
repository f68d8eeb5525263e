import json
import sys

import pytest

from lightning_pipeoffload.cli import minibatch_balance


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
        ("drawn.texts=3", "3 texts make no minibatch of 8 ranks"),
    ],
)
def test_what_cannot_be_is_one_line(run, argument, message):
    status, _, error = run("drawn.texts=64", argument) if argument[:5] != "drawn" else run(argument)
    assert status == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1

"""Decides whether a generated program runs over its ranks as on one device."""

import runpy
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.generated.choices import consistent, is_random, plain
from tests.generated.comparison import checkpoints, differences
from tests.generated.program_source import program_source
from tests.generated.trial import LIMIT_SECONDS, run_ranks, run_reference
from tests.support.caches import begin_session
from tests.support.rank_pool import RankPool

OUTCOMES = ("equal", "refused", "wrong", "crash", "hang", "invalid")


@dataclass
class Verdict:
    """What has become of a program.

    Attributes:
        outcome: "equal", "refused" before training with a message of ours, "wrong", "crash",
            "hang", or "invalid": it does not run on one device either.
        lines: what differs, or the message.
    """

    outcome: str
    lines: list = field(default_factory=list)

    @property
    def is_right(self):
        return self.outcome in ("equal", "refused")

    @property
    def kind(self):
        """How it fails, alike for programs that do so in the same way."""
        line = self.lines[-1] if self.outcome != "wrong" and self.lines else ""
        return self.outcome, "".join(c for c in line.partition(":")[0] if not c.isdigit())[:60]


class Pools:
    """Warm processes, by their number."""

    def __init__(self):
        self._pools = {}

    def get(self, size):
        if size in self._pools and not self._pools[size].is_of_use:
            self._pools.pop(size).close()
        if size not in self._pools:
            self._pools[size] = RankPool(size, LIMIT_SECONDS + 10)
        return self._pools[size]

    def close(self):
        for pool in self._pools.values():
            pool.close()


def judge(path, chosen, get_pool):
    """Run a program's file over its ranks and on one device, and compare.

    Args:
        path: The file.
        chosen: Its choices.
        get_pool: Returns the warm processes of a number.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _judge(path, chosen, get_pool, Path(folder))


def _judge(path, chosen, get_pool, folder):
    ranks, one = folder / "ranks", folder / "one"
    pool = get_pool(chosen["devices"])
    verdict, left = _run(pool, folder, run_ranks, path, str(ranks), str(folder / "rank"))
    counts = left[0].counts if left and left[0].counts else [None] * 3
    reference = get_pool(1)
    given = str(one), str(folder / "reference")
    why, alone = _run(reference, folder, run_reference, path, *given, counts, is_random(chosen))
    if verdict is not None and verdict.outcome in ("refused", "hang") or why is None and verdict:
        return verdict
    if why is not None:
        return why if why.outcome == "refused" else Verdict("invalid", why.lines)
    return _compared(left, alone[0], chosen, ranks, one)


def _run(pool, folder, function, path, place, rank_file, *more):
    """Return a verdict, None where it has come to its end, and what each rank has left."""
    try:
        left = pool.run(_of_rank, function, str(path), place, rank_file, LIMIT_SECONDS, *more)
    except TimeoutError:
        pool.close()
        return Verdict("hang", _stacks(rank_file)), None
    except AssertionError as error:
        pool.close()
        left = _written(rank_file)
        if not left:
            return Verdict("crash", str(error).splitlines()[-3:]), None
    failed = sorted((each for each in left if each.error), key=lambda each: each.failed_at)
    if not failed:
        return None, left
    if all(each.refusal for each in failed):
        return Verdict("refused", [failed[0].refusal]), left
    return Verdict("crash", failed[0].error.splitlines()), left


def _of_rank(function, path, place, rank_file, *more):
    import os

    return function(path, place, f"{rank_file}{os.environ['LOCAL_RANK']}", *more)


def _written(rank_file):
    paths = sorted(Path(rank_file).parent.glob(f"{Path(rank_file).name}*.left"))
    return [torch.load(path, weights_only=False) for path in paths]


def _stacks(rank_file):
    paths = sorted(Path(rank_file).parent.glob(f"{Path(rank_file).name}*.stacks"))
    return [line for path in paths for line in (path.name, *path.read_text().splitlines()[:40])]


def _compared(left, alone, chosen, ranks, one):
    precision, folders = chosen["precision"], (ranks, one)
    root, *others = left
    found, unread = checkpoints(ranks)
    expected, _ = checkpoints(one)
    expected = {n: v for n, v in expected.items() if n.removeprefix("checkpoint ") not in unread}
    lines = differences(found, expected, precision, folders)
    lines += differences(root.values, alone.values, precision, folders)
    for number, other in enumerate(others, start=1):
        same = {name: value for name, value in other.values.items() if _is_on_all_ranks(name)}
        of_root = {name: root.values[name] for name in same}
        more = differences(same, of_root, "64-true", (ranks, ranks))
        lines += [f"rank {number}: {line.replace('one device', 'rank 0')}" for line in more]
    return Verdict("wrong", lines) if lines else Verdict("equal")


def _is_on_all_ranks(name):
    return not name.startswith(("logged by", "result of predict"))


def judge_choices(chosen, get_pool, name=""):
    """Write a program's file and judge it."""
    chosen = consistent(chosen)
    folder = Path(tempfile.mkdtemp(prefix="generated-"))
    path = folder / "program.py"
    path.write_text(program_source(chosen, plain(), name))
    try:
        return judge(path, chosen, get_pool)
    finally:
        shutil.rmtree(folder)


def choices_of(path):
    """Return the choices that a program's file names."""
    return {**plain(), **runpy.run_path(path)["CHOSEN"]}


def print_verdict(path):
    """Judge the file that was started, print what differs and exit with 1 if it is wrong."""
    caches, pools = begin_session(), Pools()
    try:
        verdict = judge(Path(path).resolve(), choices_of(path), pools.get)
    finally:
        pools.close()
        shutil.rmtree(caches, ignore_errors=True)
    print(verdict.outcome, *verdict.lines, sep="\n")
    sys.exit(not verdict.is_right)

"""Fits in a real Jupyter kernel: interrupted, restarted and shut down while the ranks train."""

import os
import time
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
SECONDS = 200
IMPORTS = "from tests.processes.test_forking_launcher import *"
TRAIN = """
class Slow(Net):
    def on_train_batch_start(self, batch, batch_idx):
        Path(f"rank{self.trainer.global_rank}").write_text(str(os.getpid()))
        time.sleep(0.2)

loader = DataLoader(make_loader().dataset, 8, num_workers=1)
options = {**SILENT, "devices": 2, "strategy": "pipeoffload", "max_epochs": 1000}
L.Trainer(**options).fit(Slow(), loader)
"""


@pytest.fixture
def kernel(tmp_path):
    manager = KernelManager(kernel_name="python3")
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "2"}
    manager.start_kernel(cwd=str(tmp_path), env=environment)
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(SECONDS)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run(client, code):
    """Run a cell; return the name of its error, or ""."""
    return result_of(client, client.execute(code))


def result_of(client, cell):
    while True:
        reply = client.get_shell_msg(timeout=SECONDS)
        if reply["parent_header"].get("msg_id") == cell:
            return reply["content"].get("ename", "")


def start_training(client, folder):
    """Start a fit; return the message of the cell and the ids of both ranks, once they train."""
    cell = client.execute(TRAIN)
    files = [folder / f"rank{rank}" for rank in range(2)]
    late_at = time.monotonic() + SECONDS
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < late_at
        time.sleep(0.1)
    ranks = [int(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return cell, ranks


def wait_until_ended(processes):
    late_at = time.monotonic() + 30
    while any(map(is_running, processes)):
        assert time.monotonic() < late_at
        time.sleep(0.1)


def is_running(process):
    try:  # a process that nobody waits for any more is a zombie in some containers
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_kernel_outlives_an_interrupt_and_the_ranks_do_not_outlive_the_kernel(kernel, tmp_path):
    manager, client = kernel
    assert not run(client, IMPORTS)
    cell, ranks = start_training(client, tmp_path)
    manager.interrupt_kernel()
    assert result_of(client, cell) == "KeyboardInterrupt"
    wait_until_ended(ranks)
    assert not run(client, "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler")

    _, ranks = start_training(client, tmp_path)
    manager.restart_kernel(now=True)
    wait_until_ended(ranks)
    client.wait_for_ready(SECONDS)
    assert not run(client, IMPORTS)
    assert not run(client, "make_trainer().fit(Net(), make_loader())")

    _, ranks = start_training(client, tmp_path)
    manager.shutdown_kernel()
    wait_until_ended(ranks)

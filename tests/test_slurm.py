"""Under a real Slurm of two nodes: what trains ends well, and a rank that dies ends all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.on_demand_fits import assert_same, plain_fit
from tests.support.on_demand_job import COUNTS
from tests.support.slurm_cluster import MISSING, await_end, slurm_cluster

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.getuid() != 0, reason="Slurm's daemons want to be root here"),
]
ROOT = Path(__file__).parents[1]
SMALL = [
    *("trainer=cpu", "trainer.enable_progress_bar=false", "+trainer.limit_val_batches=1"),
    *("trainer.val_check_interval=1.0", "trainer.max_steps=3", "data.batch_size=4"),
    *("data.context=8", "model.width=16", "model.heads=2"),
]
DEATH = ["_target_=tests.support.slurm_cluster.Death", "rank=1", "step=2"]
PATIENCE_SECONDS = 600


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield {
            **{name: value for name, value in environment.items() if "BYTECODE" not in name},
            "MASTER_ADDR": "127.0.0.1",  # nobody knows the nodes by their names
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]),
        }


def test_jobs_end_as_their_ranks_do(cluster, tmp_path):
    """Both at once: what takes the time is the import of torch."""
    death = [f"+callbacks.death.{word}" for word in DEATH]
    sizes = ["cluster=slurm", "trainer.devices=1", "trainer.num_nodes=2"]
    command = [sys.executable, "-m", "lightning_pipeoffload.train", *SMALL, *death, *sizes]
    with subprocess.Popen(
        command, cwd=tmp_path, env=cluster, stderr=subprocess.PIPE, text=True
    ) as submitting:
        the_example_trains(cluster, tmp_path)
        said = submitting.communicate(timeout=PATIENCE_SECONDS)[1]
    assert submitting.returncode == 1, said
    assert "ended as FAILED" in said.splitlines()[-1]
    logs = [path.read_text() for path in tmp_path.rglob(".submitit/*/*_log.err")]
    assert any("global rank 0 stops because of global rank 1" in log for log in logs)


@pytest.mark.slow
def test_nodes_repeat_parameters_that_are_sharded_within_them(cluster, tmp_path):
    sizes = ["-N2", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=10"]
    command = ["srun", *sizes, sys.executable, "-m", "tests.support.on_demand_job", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=cluster, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    expected = plain_fit(COUNTS)
    for rank in range(4):
        assert_same(torch.load(tmp_path / f"{rank}.pt"), expected)


def the_example_trains(cluster, folder):
    """Submit it, on CPUs and with two tasks for each node."""
    sizes = ["--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1", "--time=10"]
    command = ["sbatch", "--parsable", *sizes, str(ROOT / "examples" / "cluster.sbatch"), *SMALL]
    job = subprocess.check_output(command, cwd=folder, env=cluster, text=True).strip()
    end = await_end(job, cluster, PATIENCE_SECONDS)
    said = (folder / f"pipeline-{job}.out").read_text()
    assert end == ("COMPLETED", "0:0"), said
    assert "samples/s" in said
    run = folder / "outputs" / job / "0"
    assert sorted(path.name for path in run.iterdir()) == [".hydra", "checkpoints", "logs"]
    assert len(list((run / "checkpoints").iterdir())) == 1

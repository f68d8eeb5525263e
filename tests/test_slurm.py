"""Under a real Slurm of two nodes: what trains ends well, and a rank that dies ends all."""

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_pipeoffload.processes import free_port
from tests.support.on_demand_fits import assert_same, plain_fit
from tests.support.on_demand_job import COUNTS

DAEMONS = ("munged", "slurmctld", "slurmd")
_WAY = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian has daemons
MISSING = [name for name in DAEMONS if shutil.which(name, path=_WAY) is None]
_PATIENCE_SECONDS = 60

# Slurm wants a plugin for cgroups though nothing here uses one; where a container has none of these
# mounted, versions before 23.11 are content with this.
_CGROUP = "CgroupPlugin=cgroup/v1"
_NO_CGROUP = "CgroupPlugin=disabled"

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
PropagateResourceLimits=NONE
KillWait=5
SchedulerParameters=sched_interval=1,batch_sched_delay=0
{nodes}
PartitionName=test Nodes=ALL Default=YES State=UP
"""


class Death(L.Callback):
    """Kills a rank after so many steps.

    Args:
        rank: its global rank.
        step: after which.
    """

    def __init__(self, rank, step):
        self._rank, self._step = rank, step

    def on_train_batch_start(self, trainer, *_):
        if (trainer.global_rank, trainer.global_step) == (self._rank, self._step):
            os.kill(os.getpid(), 9)


@contextmanager
def slurm_cluster(folder):
    """Run the daemons; give what Slurm's commands need in their environment."""
    folder.chmod(0o755)
    environment = {**os.environ, "PATH": _WAY, "SLURM_CONF": str(folder / "slurm.conf")}
    _write_configuration(folder, environment)
    daemons = []

    def start(*command):
        log = (folder / f"{command[0]}-{len(daemons)}.out").open("wb")
        daemons.append(
            # In a session of its own: Ctrl-C is for the tests, which end the jobs first.
            subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        )

    try:
        start("munged", "--foreground", "--force", *_munge_options(folder))
        _wait_until((folder / "munge.socket").exists)
        start("slurmctld", "-D")
        for node in ("node1", "node2"):
            start("slurmd", "-D", "-N", node)
        _wait_until(lambda: _idle(environment) == 2)
        try:
            yield environment
        finally:  # of a test that has failed or is broken off, jobs would outlive the daemons
            subprocess.run(["scancel", "--user=root", "--full"], env=environment, check=True)
            _wait_until(lambda: _idle(environment) == 2)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(_PATIENCE_SECONDS)


def _munge_options(folder):
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
    files = [f"--{option}={folder}/munge.{name}" for option, name in names.items()]
    return [*files, f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]


def _write_configuration(folder, environment):
    host = socket.gethostname().partition(".")[0]
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 "
        f"RealMemory=65536 State=UNKNOWN"
        for name in ("node1", "node2")
    ]
    for name in ("state", "spool-node1", "spool-node2"):
        (folder / name).mkdir()
    text = _CONFIGURATION.format(
        host=host, folder=folder, control_port=free_port(), nodes="\n".join(nodes)
    )
    (folder / "slurm.conf").write_text(text)
    version = subprocess.check_output(["slurmd", "-V"], env=environment, text=True).split()[1]
    is_new = [int(part) for part in version.split(".")[:2]] >= [23, 11]
    (folder / "cgroup.conf").write_text(_NO_CGROUP if is_new else _CGROUP)


def _idle(environment):
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return len(done.stdout.split())


def _wait_until(condition):
    end = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "Slurm's daemons do not come up"
        time.sleep(0.1)


def await_end(job, environment, patience_seconds):
    """Return a job's last state and exit code."""
    end = time.monotonic() + patience_seconds
    while time.monotonic() < end:
        command = ["scontrol", "--oneliner", "show", "job", job]
        text = subprocess.check_output(command, env=environment, text=True)
        said = dict(word.split("=", 1) for word in text.split() if "=" in word)
        if said["JobState"] not in ("PENDING", "RUNNING", "SIGNALING", "COMPLETING"):
            return said["JobState"], said["ExitCode"]
        time.sleep(0.3)
    raise TimeoutError(f"job {job} has not ended in {patience_seconds} s")


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
DEATH = ["_target_=tests.test_slurm.Death", "rank=1", "step=2"]
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
    sizes = ["-N2", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=30"]
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
    sizes = ["--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1", "--time=30"]
    command = ["sbatch", "--parsable", *sizes, str(ROOT / "examples" / "cluster.sbatch"), *SMALL]
    job = subprocess.check_output(command, cwd=folder, env=cluster, text=True).strip()
    end = await_end(job, cluster, PATIENCE_SECONDS)
    said = (folder / f"pipeline-{job}.out").read_text()
    assert end == ("COMPLETED", "0:0"), said
    assert "samples/s" in said
    run = folder / "outputs" / job / "0"
    assert sorted(path.name for path in run.iterdir()) == [".hydra", "checkpoints", "logs"]
    assert len(list((run / "checkpoints").iterdir())) == 1

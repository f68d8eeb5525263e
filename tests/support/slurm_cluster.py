"""A Slurm of two nodes on this machine: its real daemons, as long as a test runs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L

from lightning_pipeoffload.processes.run_store import free_port

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

    def __init__(self, rank: int, step: int) -> None:
        self._rank, self._step = rank, step

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self._rank, self._step):
            os.kill(os.getpid(), 9)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run the daemons; give what Slurm's commands need in their environment."""
    folder.chmod(0o755)
    environment = {**os.environ, "PATH": _WAY, "SLURM_CONF": str(folder / "slurm.conf")}
    _write_configuration(folder, environment)
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
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


def _munge_options(folder: Path) -> list[str]:
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
    files = [f"--{option}={folder}/munge.{name}" for option, name in names.items()]
    return [*files, f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]


def _write_configuration(folder: Path, environment: dict[str, str]) -> None:
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


def _idle(environment: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return len(done.stdout.split())


def _wait_until(condition: Any) -> None:
    end = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "Slurm's daemons do not come up"
        time.sleep(0.1)


def await_end(job: str, environment: dict[str, str], patience_seconds: float) -> tuple[str, str]:
    """Return a job's last state and exit code."""
    end = time.monotonic() + patience_seconds
    while time.monotonic() < end:
        command = ["scontrol", "--oneliner", "show", "job", job]
        text = subprocess.check_output(command, env=environment, text=True)
        said = dict(word.split("=", 1) for word in text.split() if "=" in word)
        if said["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"):
            return said["JobState"], said["ExitCode"]
        time.sleep(0.3)
    raise TimeoutError(f"job {job} has not ended in {patience_seconds} s")

"""Programs that a test runs to their end, in processes of their own."""

import os
import subprocess


def output_of(command, folder, **environment):
    """Run a command without input; return what it prints. One that fails shows its errors.

    Args:
        command: The command and its arguments.
        folder: Where it runs.
        **environment: Variables in addition to those of this process.
    """
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

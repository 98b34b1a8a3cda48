"""The example of a pipeline run by hand: every schedule ends with the weights of one process, bit for bit."""

import subprocess

from train_program import PROGRAM

PIPELINE = PROGRAM.parents[1] / "pipeline" / "fsdpp-pipeline"


def test_every_schedule_has_the_bits_of_one_process():
    done = subprocess.run([PIPELINE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["1F1B", "interleaved 1F1B", "zero bubble"]
    assert all(line.endswith("the bits of one process") for line in lines), lines

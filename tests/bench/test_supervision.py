"""Processes that crash, hang or refuse: which arm is left out, what stays done, what is said."""

import os
import signal
import sys
import time
from functools import partial

import pytest

from pageweaver_sglang.bench import supervision
from pageweaver_sglang.bench.protocol import DeviceLost

ARMS = ("good", "bad", "last")


def work(trouble, log, workloads, without, report):
    """Every arm on every workload; the arm ``bad`` makes trouble on the second of them."""
    for workload in workloads:
        for arm in ARMS:
            if arm in without:
                continue
            report.begins(arm)
            with open(log, "a") as out:
                out.write(f"{workload} {arm}\n")
            if (workload, arm) == ("two", "bad"):
                trouble()
        report.done(workload)


def segfault():
    os.kill(os.getpid(), signal.SIGSEGV)


def lose_the_device():
    raise DeviceLost("bad", "CUDA error: an illegal memory access")


def refuse():
    raise ValueError("no GPU here")


def fail():
    raise KeyError("a bug")


def supervised(trouble, tmp_path, patience=60.0):
    done, said = [], []
    job = partial(work, trouble, tmp_path / "log")
    try:
        supervision.supervise(job, ["one", "two", "three"], patience=patience, on_done=done.append, on_loss=said.append)
    finally:
        lines = (tmp_path / "log").read_text().splitlines()
    return done, said, lines


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (segfault, "it ended the process by SIGSEGV"),
        (partial(sys.exit, 5), "it ended the process with exit code 5"),
        (lose_the_device, "CUDA error: an illegal memory access"),
        (partial(time.sleep, 600), "it hung: nothing happened for 5 s"),
    ],
)
def test_an_arm_that_ends_the_process_is_left_out(tmp_path, trouble, reason):
    done, said, lines = supervised(trouble, tmp_path, patience=5.0 if "hung" in reason else 600.0)
    assert done == ["one", "two", "three"]
    assert said == [f"bad: {reason}. Going on without it, from two."]
    assert lines == ["one good", "one bad", "one last", "two good", "two bad"] + [
        f"{workload} {arm}" for workload in ("two", "three") for arm in ("good", "last")
    ]


def test_what_no_arm_did_ends_it(tmp_path, capfd):
    with pytest.raises(supervision.Refused, match="no GPU here"):
        supervised(refuse, tmp_path)
    with pytest.raises(supervision.Crashed, match="KeyError"):
        supervised(fail, tmp_path)
    assert "a bug" in capfd.readouterr().err

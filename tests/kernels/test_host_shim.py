"""The shim that runs CUDA kernels on the CPU: what it computes, and the mistakes that it must not let pass."""

from __future__ import annotations

import ctypes
import subprocess

import numpy as np
import pytest
from host_kernels import HAS_GXX, HOST

pytestmark = pytest.mark.skipif(not HAS_GXX, reason="no g++ on PATH")
REVERSE, WARP_VOTES, BARRIER_IN_A_BRANCH, LANES_APART, PARTIAL_MASK = range(5)
ALL_STORE, STORE_AND_ADD, STORES_IN_TURN, SHUFFLE_IS_NO_BARRIER = range(5, 9)


@pytest.fixture(scope="module", params=["own context switch", "ucontext"])
def run(request, tmp_path_factory):
    library = tmp_path_factory.mktemp("shim") / "shim_checks.so"
    flags = ["-DSHIM_UCONTEXT"] if request.param == "ucontext" else []
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden", *flags, f"-I{HOST}"]
    subprocess.run([*command, str(HOST / "shim_checks.cpp"), "-o", str(library)], check=True)
    shim = ctypes.CDLL(str(library))
    shim.message.restype = ctypes.c_char_p

    def call(kernel, seed, find_races=False):
        out = np.zeros(192, np.int32)
        error = shim.run(kernel, ctypes.c_uint64(seed), int(find_races), ctypes.c_void_p(out.ctypes.data))
        return out, error, shim.message().decode()

    return call


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_right_kernels(run, seed):
    out, error, message = run(REVERSE, seed)
    assert (error, message) == (0, "")
    np.testing.assert_array_equal(out.reshape(3, 64), np.arange(63, -1, -1) + np.arange(3)[:, None])
    out, error, message = run(WARP_VOTES, seed)
    assert (error, message) == (0, "")
    assert out[:64].all()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("kernel", "says"),
    [(BARRIER_IN_A_BRANCH, "deadlock"), (LANES_APART, "threads of one warp are in"), (PARTIAL_MASK, "partial mask")],
)
def test_wrong_kernels(run, kernel, says, seed):
    _, error, message = run(kernel, seed)
    assert error != 0
    assert says in message
    assert run(REVERSE, seed)[1:] == (0, "")  # and goes on afterwards


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_races(run, seed):
    for kernel in (ALL_STORE, STORE_AND_ADD, SHUFFLE_IS_NO_BARRIER):
        assert run(kernel, seed)[1:] == (0, "")
        _, error, message = run(kernel, seed, find_races=True)
        assert error != 0
        assert "race" in message
    for kernel in (REVERSE, STORES_IN_TURN):
        out, error, message = run(kernel, seed, find_races=True)
        assert (error, message) == (0, "")
    assert out[:64].all()

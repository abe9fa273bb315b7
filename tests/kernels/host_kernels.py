"""The regroup and union-preparation kernels on the CPU: compiled with g++ through the shim in host/, called by ctypes.

NumPy only, so that a run under AddressSanitizer stays small. As a script it replays cases from a file (see ``replay``).
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

HOST = Path(__file__).resolve().parent / "host"
KERNELS = HOST.parents[2] / "kernels"
HAS_GXX = shutil.which("g++") is not None
UNWRITTEN = -77  # outputs start with it: every element of perm and of the plan must be written
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


# cu_seqlens for 100 token rows that no caller should pass: behind the rows, decreasing, negative.
BROKEN_CU_SEQLENS = [
    [0, 40, 300],
    [0, 2**31 - 1, 100],
    [0, -(2**31), 100],
    [0, 80, 20, 90],
    [-50, 20, 100],
    [70, 20, 100],
    [500, 600, 700],
]


class KernelFailure(RuntimeError):
    """The launcher refused its arguments, or the shim found an error."""


class _Lengths(ctypes.Structure):
    _fields_ = [
        ("cu_seqlens", ctypes.c_void_p),
        ("prefix_lens", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("requests", ctypes.c_int),
        ("tokens", ctypes.c_int),
    ]


class _PlanPtrs(ctypes.Structure):
    _names = ("pages", "masks", "counts", "queries", "limits", "slots", "queue", "marks")
    _fields_ = [(name, ctypes.c_void_p) for name in _names]


def compile_library(folder: Path, *flags: str, kernels: Path = KERNELS) -> Path:
    """Builds the kernels of ``kernels`` as a shared library in ``folder`` and returns its path."""
    library = folder / "host_kernels.so"
    command = ["g++", "-std=c++17", "-O2", "-g1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fPIC"]
    command += ["-shared", "-fvisibility=hidden", *flags, f"-I{kernels}", f"-I{HOST}", str(HOST / "host_kernels.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


def _int32(array) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=np.int32)


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


class HostKernels:
    """Calls one compiled library. Arrays are NumPy; a ``seed`` other than 0 runs threads and CTAs in random order."""

    def __init__(self, library: Path):
        self._lib = ctypes.CDLL(str(library))
        self._lib.host_message.restype = ctypes.c_char_p

    def remove_barrier(self, number: int) -> None:
        """Leave one barrier out from now on; for a library of :func:`compile_with_removable_barriers`."""
        self._lib.host_remove_barrier(number)

    def find_races(self, on: bool) -> None:
        """From now on a race between stores to shared memory is a :class:`KernelFailure`; slow."""
        self._lib.host_find_races(int(on))

    def divide(self, n: int, divisor: int) -> int:
        """``n // divisor`` by ``Divisor`` of common.cuh."""
        return self._lib.host_divide(n, divisor)

    def _check(self, code: int) -> None:
        if code != 0:
            raise KernelFailure(f"cudaError {code}: {self._lib.host_message().decode() or 'invalid value'}")

    def _topk(self, topk: np.ndarray) -> tuple:
        assert topk.dtype == np.int32
        assert topk.size == 0 or topk.shape[2] == 1 or topk.strides[2] == 4
        head, row = (ctypes.c_int64(stride // 4) for stride in topk.strides[:2])
        return ctypes.c_void_p(topk.ctypes.data), head, row, topk.shape[0], topk.shape[2]

    def regroup(
        self, topk, cu_seqlens, prefix_lens, *, window=128, group_size=8, page_size=128, capacity=0, guard=False,
        visits=None, seed=0,
    ) -> np.ndarray:  # fmt: skip
        """perm int32 [kv_heads, tokens]; ``topk`` int32 [kv_heads, tokens, k], rows contiguous.

        ``visits``, int64 [2], is added to: page visits of the original order and of perm.
        """
        assert visits is None or (visits.dtype == np.int64 and visits.shape == (2,))
        cu_seqlens, prefix_lens = _int32(cu_seqlens), _int32(prefix_lens)
        tokens = topk.shape[1]
        lengths = _Lengths(_address(cu_seqlens), _address(prefix_lens), None, len(prefix_lens), tokens)
        perm = np.full((topk.shape[0], tokens), UNWRITTEN, np.int32)
        self._lib.host_set_seed(ctypes.c_uint64(seed))
        code = self._lib.host_regroup(
            *self._topk(topk), ctypes.byref(lengths), window, group_size, page_size, capacity, int(guard),
            ctypes.c_void_p(perm.ctypes.data), ctypes.c_void_p(_address(visits)),
        )  # fmt: skip
        self._check(code)
        return perm

    def union_prep(
        self, topk, perm, cu_seqlens, seq_lens, prefix_lens, *, groups, window=128, group_size=8, page_size=128,
        req_to_token=None, slot_ids=None, num_pool_pages=0, marks=None, seed=0,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """The arrays of a UnionPlan by name, for ``groups`` rows per KV head; ``slots`` only with ``req_to_token``.

        ``marks``, int32 [kv_heads, num_pool_pages], is what they hold before; the result's are a copy.
        """
        cu_seqlens, prefix_lens, seq_lens = _int32(cu_seqlens), _int32(prefix_lens), _int32(seq_lens)
        heads, tokens, k = topk.shape
        lengths = _Lengths(_address(cu_seqlens), _address(prefix_lens), _address(seq_lens), len(prefix_lens), tokens)
        perm = None if perm is None else _int32(perm)
        entries, members = (heads, groups, group_size * k), (heads, groups, group_size)
        plan = {
            "pages": np.full(entries, UNWRITTEN, np.int32),
            "masks": np.full(entries, 0xEE, np.uint8 if group_size <= 8 else np.int32),
            "counts": np.full(entries[:2], UNWRITTEN, np.int32),
            "queries": np.full(members, UNWRITTEN, np.int32),
            "limits": np.full(members, UNWRITTEN, np.int32),
            "queue": np.full(2, UNWRITTEN, np.int32),
        }
        rows = positions = stride = 0
        if req_to_token is not None:
            plan["slots"] = np.full(entries, UNWRITTEN, np.int32)
            req_to_token = np.asarray(req_to_token, dtype=np.int32)  # rows may lie apart
            assert req_to_token.strides[1] == 4
            rows, positions = req_to_token.shape
            stride = req_to_token.strides[0] // 4
            assert slot_ids.dtype in (np.int32, np.int64)
        if marks is not None:
            assert marks.shape == (heads, num_pool_pages)
            plan["marks"] = _int32(marks).copy()
        pointers = _PlanPtrs(**{name: _address(array) for name, array in plan.items()})
        self._lib.host_set_seed(ctypes.c_uint64(seed))
        code = self._lib.host_union_prep(
            *self._topk(topk), ctypes.c_void_p(_address(perm)), ctypes.byref(lengths),
            ctypes.c_void_p(_address(req_to_token)), ctypes.c_int64(stride), rows, positions,
            ctypes.c_void_p(_address(slot_ids)),
            int(slot_ids is not None and slot_ids.dtype == np.int64), num_pool_pages, window, group_size, page_size,
            ctypes.byref(pointers), groups, group_size * k,
        )  # fmt: skip
        self._check(code)
        return plan


def replay(library: str, cases: str, removed_barrier: str = "-1") -> None:
    """Runs pickled cases ``(function, args, kwargs, expected)`` and asserts the expected arrays.

    A library that was compiled for it leaves out the barrier with the given number.
    """
    kernels = HostKernels(Path(library))
    if removed_barrier != "-1":
        kernels.remove_barrier(int(removed_barrier))
    with open(cases, "rb") as file:
        for function, args, kwargs, expected in pickle.load(file):
            result = getattr(kernels, function)(*args, **kwargs)
            for name, array in expected.items() if isinstance(expected, dict) else [("perm", expected)]:
                got = result[name] if isinstance(result, dict) else result
                np.testing.assert_array_equal(got, array, err_msg=f"{function} {kwargs}: {name}")
    print("replayed")


def run_replay(library: Path, cases: list[tuple], *arguments: str, environment: dict[str, str] | None = None):
    """:func:`replay` in a process of its own, which may crash. Returns the CompletedProcess."""
    file = library.with_suffix(".pickle")
    file.write_bytes(pickle.dumps(cases))
    command = [sys.executable, __file__, str(library), str(file), *arguments]
    environment = {**os.environ, **(environment or {})}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)


def compile_with_removable_barriers(folder: Path, source: str, barrier: str) -> tuple[Path, int]:
    """Builds a copy in which any one ``barrier`` statement of ``source`` can be left out; returns their number too."""
    for name in ("common.cuh", "regroup.cuh", "union_prep.cuh"):
        (folder / name).write_text((KERNELS / name).read_text())
    before, *parts = (KERNELS / source).read_text().split(barrier)
    text = before + "".join(f"if (removed_barrier != {i}) {barrier}{part}" for i, part in enumerate(parts))
    control = """inline int removed_barrier = -1;
    extern "C" __attribute__((visibility("default"), used)) inline void host_remove_barrier(int number) {
        removed_barrier = number;
    }
    namespace pw {"""
    (folder / source).write_text(text.replace("namespace pw {", control, 1))
    return compile_library(folder, kernels=folder), len(parts)


def sanitizer_runtime() -> Path | None:
    """The AddressSanitizer runtime of g++, which has to be loaded before Python; None when there is none."""
    if not HAS_GXX:
        return None
    found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = Path(found.stdout.strip()).resolve()
    return library if library.is_file() else None


def run_sanitized(library: Path, cases: list[tuple]):
    """:func:`run_replay` for a library that was compiled with ``SANITIZERS``."""
    return run_replay(
        library, cases, environment={"LD_PRELOAD": str(sanitizer_runtime()), "ASAN_OPTIONS": "detect_leaks=0"}
    )


if __name__ == "__main__":
    replay(*sys.argv[1:])

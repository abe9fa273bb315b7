"""The regroup kernel, run on the CPU through the shim, equals the reference engine bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from host_kernels import (
    BROKEN_CU_SEQLENS,
    HAS_GXX,
    KERNELS,
    SANITIZERS,
    UNWRITTEN,
    HostKernels,
    KernelFailure,
    compile_library,
    compile_with_removable_barriers,
    run_replay,
    run_sanitized,
    sanitizer_runtime,
)

import pageweaver_sglang as pw
from pageweaver_sglang import synthetic
from tests import naive
from tests.generators import CASE_NAMES, make_case

pytestmark = pytest.mark.skipif(not HAS_GXX, reason="no g++ on PATH")

DATA = Path(__file__).parents[1] / "data"
WINDOWS = [{"window": 64}, {"window": 128, "guard": True}]
WORKLOADS = ["ctx8k", "ctx16k", "ctx32k_chunk2", "ctx64k_a", "ctx64k_flat", "ctx64k_mixed", "ctx128k", "packed"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return HostKernels(compile_library(tmp_path_factory.mktemp("host")))


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    """The reference works on small tensors: threads that wait for each other on a busy machine only cost time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference(topk, cu_seqlens, prefix_lens, *, capacity=0, guard=False, seed=0, **options):
    lengths = (torch.tensor(np.asarray(lens), dtype=torch.int32) for lens in (cu_seqlens, prefix_lens))
    perm = pw.reference.regroup(
        torch.from_numpy(np.ascontiguousarray(topk)),
        *lengths,
        capacity=capacity or None,
        guard="window" if guard else "none",
        **options,
    )
    return perm.numpy()


def assert_matches(kernels, topk, cu_seqlens, prefix_lens, **options):
    """Compare with the reference; return the permutation."""
    perm = kernels.regroup(topk, cu_seqlens, prefix_lens, **options)
    np.testing.assert_array_equal(perm, reference(topk, cu_seqlens, prefix_lens, **options))
    return perm


def batch(lengths, padding=0):
    """cu_seqlens of requests of ``lengths`` rows, and the number of rows with padding."""
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return cu_seqlens, int(cu_seqlens[-1]) + padding


def hostile(seed, *, max_requests=6, max_length=200):
    """A random call: ids unsorted, repeated, negative and too large, empty requests, padding, odd shapes."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, max_length, rng.integers(1, max_requests + 1)) * (rng.random() < 0.9)
    cu_seqlens, tokens = batch(lengths * (rng.random(len(lengths)) < 0.8), int(rng.integers(0, 70)))
    page_size = int(rng.choice([16, 64, 128]))
    prefix_lens = rng.integers(0, 1 << rng.integers(3, 27), len(lengths))
    top = int(prefix_lens.max() + 200) // page_size
    if rng.random() < 0.7:
        top = min(top, int(rng.integers(1, 400)))
    topk = rng.integers(-3, top + 2, (rng.integers(1, 4), tokens, rng.integers(1, 17))).astype(np.int32)
    topk[rng.random(topk.shape) < 0.1] = rng.choice([-1, np.iinfo(np.int32).min, np.iinfo(np.int32).max])
    options = {
        "window": int(rng.choice([64, 128])),
        "group_size": int(rng.integers(1, 33)),
        "page_size": page_size,
        "capacity": int(rng.choice([0, 0, 100, 512])),
        "guard": bool(rng.integers(2)),
    }
    return (topk, cu_seqlens, prefix_lens), options


@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads(kernels, workload, window):
    w = pw.load_workload(DATA / f"{workload}.npz")
    arguments = (w.topk_idx.numpy(), w.cu_seqlens.numpy(), w.prefix_lens.numpy())
    assert_matches(kernels, *arguments, window=window)
    assert_matches(kernels, *arguments, window=window, guard=True)


def test_capacity_keeps_the_original_order(kernels):
    """ctx128k has 1024 pages: with the paper's 512 it keeps its order, without a limit its pages are renamed."""
    w = pw.load_workload(DATA / "ctx128k.npz")
    arguments = (w.topk_idx.numpy(), w.cu_seqlens.numpy(), w.prefix_lens.numpy())
    original = np.arange(w.topk_idx.shape[1])[None]
    np.testing.assert_array_equal(assert_matches(kernels, *arguments, capacity=512), original)
    assert (assert_matches(kernels, *arguments, capacity=1024) != original).any()


def unlimited_bitmap_order(topk: np.ndarray, window: int, group_size: int = 8) -> np.ndarray:
    """Algorithm 1 for one request and KV head, with one bit for every page of the context: Python's integers."""
    bitmaps = [sum(1 << page for page in set(row)) for row in topk.tolist()]
    order: list[int] = []
    for first in range(0, len(bitmaps), window):
        left = list(range(first, min(first + window, len(bitmaps))))
        while left:
            union = 0
            for place in range(min(group_size, len(left))):
                costs = [(bitmaps[query] & ~union).bit_count() for query in left] if place else [0]
                query = left.pop(costs.index(min(costs)))
                union |= bitmaps[query]
                order.append(query)
    return np.array(order, dtype=np.int32)


@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("name", ["ctx128k", "ctx256k", "ctx1m"])
def test_renaming_is_an_unlimited_bitmap(kernels, name, window):
    """To 8,192 pages: past 4,096 the kernel finds names by hashing."""
    ((queries, prefix),) = synthetic.PRESETS[name][1].requests
    w = synthetic.make_workload(synthetic.preset(name, requests=((2000, prefix + queries - 2000),)))
    topk = w.topk_idx.numpy()
    assert topk.max() == (prefix + queries) // 128 - 1
    perm = assert_matches(kernels, topk, w.cu_seqlens.numpy(), w.prefix_lens.numpy(), window=window)
    np.testing.assert_array_equal(perm[0], unlimited_bitmap_order(topk[0], window))
    assert (perm[0] != np.arange(2000)).any()


def test_capacity_is_per_request(kernels):
    rng = np.random.default_rng(7)
    cu_seqlens, tokens = batch([100, 100])
    topk = rng.integers(0, 40, (1, tokens, 16)).astype(np.int32)
    perm = assert_matches(kernels, topk, cu_seqlens, [512 * 128 - 100, 512 * 128 - 99], capacity=512)
    assert (perm[0, :100] != np.arange(100)).any()
    np.testing.assert_array_equal(perm[0, 100:], np.arange(100, 200))


@pytest.mark.parametrize("name", CASE_NAMES)
def test_named_cases(kernels, name):
    for seed in range(2):
        case = make_case(name, seed=seed)
        for window in (64, 128):
            topk, lengths = case.topk_idx.numpy(), (case.cu_seqlens.numpy(), case.prefix_lens.numpy())
            assert_matches(kernels, topk, *lengths, window=window, guard=seed == 1)


@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 7, 8, 16, 31, 32])
def test_group_sizes(kernels, group_size, window):
    rng = np.random.default_rng(group_size)
    cu_seqlens, tokens = batch([window, 1, 2 * window + 37, group_size])
    topk = rng.integers(0, 60, (2, tokens, 16)).astype(np.int32)
    for guard in (False, True):
        options = {"window": window, "group_size": group_size, "guard": guard}
        assert_matches(kernels, topk, cu_seqlens, [7680, 9000, 8000, 8000], **options)


@pytest.mark.parametrize("top", [20, 130, 180, 260, 520, 2000, 4096, 4097, 1 << 20])
def test_number_of_distinct_pages(kernels, top):
    """From a few pages to a window full of different ones: every width of the bitmaps, names by id and by hashing."""
    rng = np.random.default_rng(top)
    cu_seqlens, tokens = batch([300])
    topk = rng.integers(0, top, (1, tokens, 16)).astype(np.int32)
    topk[:, 1::2, :8] = topk[:, ::2, :8]
    for window in (64, 128):
        assert_matches(kernels, topk, cu_seqlens, [top * 128 - 300], window=window)


@pytest.mark.parametrize("top", [4096, 1 << 20])
@pytest.mark.parametrize("window", [64, 128])
def test_every_page_twice(kernels, window, top):
    """The most bits that a window can need: window * 16 / 2 pages, each in two queries."""
    rng = np.random.default_rng(window)
    pages = rng.choice(top, window * 8, replace=False)
    topk = rng.permutation(np.concatenate([pages, pages])).reshape(1, window, 16).astype(np.int32)
    perm = assert_matches(kernels, topk, [0, window], [top * 128 - window], window=window)
    assert (perm != np.arange(window)).any()


def test_ids_that_collide_in_the_hash_table(kernels):
    """Ids of one residue: whatever the hash keeps of an id, long runs of probes appear."""
    rng = np.random.default_rng(3)
    for step in (4096, 1 << 16):
        topk = (rng.integers(0, 250, (1, 128, 16)) * step).astype(np.int32)
        assert_matches(kernels, topk, [0, 128], [250 * step - 128], page_size=1)


def test_guard_keeps_a_window_that_would_lose(kernels):
    """Four queries for which greedy pairs cost 13 visits instead of 12, beside a window that gains."""
    loses = [[1, 2, 3, 4], [1, 2, 6, 7], [1, 2, 3, 5], [3, 5, 8, 9]]
    gains = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], [5, 6, 7, 8]]
    topk = np.array([loses + gains], dtype=np.int32)
    options = {"window": 64, "group_size": 2, "page_size": 16}
    unguarded = assert_matches(kernels, topk, [0, 4, 8], [200, 200], **options)
    np.testing.assert_array_equal(unguarded, [[0, 2, 1, 3, 4, 6, 5, 7]])
    guarded = assert_matches(kernels, topk, [0, 4, 8], [200, 200], guard=True, **options)
    np.testing.assert_array_equal(guarded, [[0, 1, 2, 3, 4, 6, 5, 7]])


@pytest.mark.parametrize("seed", range(40))
def test_hostile_inputs(kernels, seed):
    arguments, options = hostile(seed)
    assert_matches(kernels, *arguments, **options, seed=seed % 3)


@pytest.mark.parametrize("cu_seqlens", BROKEN_CU_SEQLENS)
def test_broken_cu_seqlens_write_nothing_but_ids(kernels, cu_seqlens):
    """Which order the rows get is nobody's business, but every written element is a row of the call."""
    topk = np.random.default_rng(0).integers(-2, 90, (2, 100, 16)).astype(np.int32)
    for options in WINDOWS:
        perm = kernels.regroup(topk, cu_seqlens, [5000] * (len(cu_seqlens) - 1), **options)
        assert (((perm >= 0) & (perm < 100)) | (perm == UNWRITTEN)).all()


@pytest.mark.parametrize("requests", [31, 32, 33, 300])
def test_many_tiny_requests(kernels, requests):
    rng = np.random.default_rng(requests)
    cu_seqlens, tokens = batch(rng.integers(0, 10, requests), padding=5)
    topk = rng.integers(-1, 30, (2, tokens, 8)).astype(np.int32)
    for window in (64, 128):
        assert_matches(kernels, topk, cu_seqlens, rng.integers(0, 4000, requests), window=window, group_size=3)


def test_sequence_of_almost_2_to_the_31_tokens(kernels):
    rng = np.random.default_rng(3)
    topk = rng.integers(2**24 - 40, 2**24 + 2, (1, 100, 16)).astype(np.int32)
    perm = assert_matches(kernels, topk, [0, 100], [2**31 - 101])
    assert (perm != np.arange(100)).any()


def test_empty_requests_and_padding(kernels):
    rng = np.random.default_rng(1)
    topk = rng.integers(0, 20, (3, 200, 16)).astype(np.int32)
    assert_matches(kernels, topk, [0, 0, 0, 70, 70, 71, 71], [0, 9, 5000, 0, 5000, 3])
    np.testing.assert_array_equal(assert_matches(kernels, topk, [0, 0], [5000]), np.tile(np.arange(200), (3, 1)))
    assert assert_matches(kernels, topk[:, :0], [0, 0], [0]).shape == (3, 0)


def test_strided_topk(kernels):
    """Head and row strides, and rows whose start is not a multiple of 16 bytes."""
    rng = np.random.default_rng(2)
    wide = rng.integers(0, 50, (5, 150, 41)).astype(np.int32)
    for topk in (wide[1:4, :130, :16], wide[::2, 10:, 3:18], wide[:, ::2, 8:24], wide[:, :, :1]):
        cu_seqlens, _ = batch([topk.shape[1] - 3], padding=3)
        assert_matches(kernels, topk, cu_seqlens, [50 * 128])


def test_order_of_execution_does_not_matter(kernels):
    w = pw.load_workload(DATA / "packed.npz")
    arguments = (w.topk_idx.numpy(), w.cu_seqlens.numpy(), w.prefix_lens.numpy())
    for seed in (1, 2, 3):
        assert_matches(kernels, *arguments, guard=True, seed=seed)


@pytest.mark.parametrize(
    "options", [{"window": 32}, {"group_size": 0}, {"group_size": 33}, {"page_size": 0}, {"capacity": -1}]
)
def test_launcher_refuses(kernels, options):
    with pytest.raises(KernelFailure, match="invalid value"):
        kernels.regroup(np.zeros((1, 4, 16), np.int32), [0, 4], [0], **options)


def test_launcher_refuses_more_than_16_ids(kernels):
    with pytest.raises(KernelFailure, match="invalid value"):
        kernels.regroup(np.zeros((1, 4, 17), np.int32), [0, 4], [0])


# ----------------------------------------------------------------- Visits counted on the way
def counted(kernels, topk, cu_seqlens, prefix_lens, **options):
    """The order and what was added to the counters; they begin with other values than zero, and order as without."""
    visits = np.array([7, 1 << 40])
    perm = kernels.regroup(topk, cu_seqlens, prefix_lens, visits=visits, **options)
    np.testing.assert_array_equal(perm, kernels.regroup(topk, cu_seqlens, prefix_lens, **options))
    return perm, list(visits - [7, 1 << 40])


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_counters_are_the_plans_visits(kernels, workload, window, guard):
    w = pw.load_workload(DATA / f"{workload}.npz")
    arguments = (w.topk_idx.numpy(), w.cu_seqlens.numpy(), w.prefix_lens.numpy())
    perm, visits = counted(kernels, *arguments, window=window, guard=guard)
    lengths = (w.cu_seqlens, w.seq_lens, w.prefix_lens)
    plans = (pw.prepare_unions(w.topk_idx, order, *lengths) for order in (None, torch.from_numpy(perm)))
    assert visits == [plan.visits() for plan in plans]


@pytest.mark.parametrize("seed", range(12))
def test_counters_of_hostile_inputs(kernels, seed):
    """The kernel's and the reference engine's are those that sets and loops count, window by window."""
    (topk, cu_seqlens, prefix_lens), options = hostile(seed, max_requests=3, max_length=90)
    perm, visits = counted(kernels, topk, cu_seqlens, prefix_lens, **options, seed=seed % 3)
    expected = [0, 0]
    for head, rows in enumerate(topk.tolist()):
        for request, ids in naive.windows(cu_seqlens.tolist(), options["window"]):
            tokens = int(prefix_lens[request] + cu_seqlens[request + 1] - cu_seqlens[request])
            if options["capacity"] and -(-tokens // options["page_size"]) > options["capacity"]:
                continue
            supports = {query: naive.support_set(rows[query], tokens, options["page_size"]) for query in ids}
            for number, order in enumerate((ids, perm[head, ids[0] : ids[-1] + 1].tolist())):
                expected[number] += naive.visits(order, supports, options["group_size"])
    assert visits == expected
    of_reference = torch.tensor([7, 1 << 40])
    reference(topk, cu_seqlens, prefix_lens, visits=of_reference, **options)
    assert (of_reference - torch.tensor([7, 1 << 40])).tolist() == expected


# ----------------------------------------------------------------- What the shim finds, and that it can find it
def test_shuffled_order_shows_every_missing_barrier(tmp_path):
    """Each barrier of the kernel, left out, gives another result, an error or a crash in some order of execution."""
    library, barriers = compile_with_removable_barriers(tmp_path, "regroup.cuh", "__syncthreads();")
    rng = np.random.default_rng(11)
    cases = []
    for seed in range(1, 9):
        for top, group_size in ((60, 8), (9000, 7), (9000, 3)):
            topk = rng.integers(0, top, (1, 250, 16)).astype(np.int32)
            topk[:, 1::2, :12] = topk[:, ::2, :12]
            arguments, options = (topk, [0, 128, 250], [top * 128 - 128] * 2), {"group_size": group_size, "guard": True}
            cases.append(("regroup", arguments, {**options, "seed": seed}, reference(*arguments, **options)))
    complete = run_replay(library, cases, str(barriers))  # none has that number
    assert complete.returncode == 0, complete.stderr
    assert barriers >= 8
    unnoticed = [i for i in range(barriers) if run_replay(library, cases, str(i)).returncode == 0]
    assert unnoticed == []


@pytest.mark.parametrize("seed", [0, 1])
def test_no_two_threads_store_to_the_same_place(kernels, seed):
    """Pages that all queries have, repeated ids, names by id and by hashing, every width of the bitmaps."""
    rng = np.random.default_rng(seed)
    kernels.find_races(True)
    try:
        for top in (4, 130, 180, 260, 1000, 5000):
            topk = rng.integers(-1, top, (1, 150, 16)).astype(np.int32)
            topk[:, 1::2, :8] = topk[:, ::2, :8]
            for window in (64, 128):
                assert_matches(kernels, topk, [0, 150], [top * 128 - 150], window=window, guard=True, seed=seed)
    finally:
        kernels.find_races(False)


@pytest.mark.skipif(sanitizer_runtime() is None, reason="g++ has no AddressSanitizer runtime here")
def test_no_access_out_of_bounds(kernels, tmp_path):
    cases = []
    for seed in range(100, 115):
        arguments, options = hostile(seed)
        cases.append(("regroup", arguments, options, kernels.regroup(*arguments, **options)))
    topk = np.random.default_rng(0).integers(-2, 90, (2, 100, 16)).astype(np.int32)
    for cu_seqlens in BROKEN_CU_SEQLENS:
        arguments = (topk, cu_seqlens, [5000, -(2**31), 1_000_000][: len(cu_seqlens) - 1])
        cases += [("regroup", arguments, options, kernels.regroup(*arguments, **options)) for options in WINDOWS]
    result = run_sanitized(compile_library(tmp_path, *SANITIZERS), cases)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "replayed" in result.stdout


@pytest.mark.skipif(sanitizer_runtime() is None, reason="g++ has no AddressSanitizer runtime here")
def test_sanitizer_finds_an_overrun(tmp_path):
    """A copy of the kernel that takes every id for an entry of the name table."""
    for name in ("common.cuh", "union_prep.cuh", "regroup.cuh"):
        (tmp_path / name).write_text((KERNELS / name).read_text())
    text = (KERNELS / "regroup.cuh").read_text()
    assert "if (pages > kTableEntries)" in text
    (tmp_path / "regroup.cuh").write_text(text.replace("if (pages > kTableEntries)", "if (pages > 1 << 30)"))
    topk = np.full((1, 64, 16), 50_000, np.int32)
    case = ("regroup", (topk, [0, 64], [60_000 * 128]), {}, np.arange(64)[None])
    result = run_sanitized(compile_library(tmp_path, *SANITIZERS, kernels=tmp_path), [case])
    assert result.returncode != 0
    assert "AddressSanitizer" in result.stderr or "runtime error" in result.stderr

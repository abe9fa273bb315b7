"""The union-preparation kernel, run on the CPU through the shim, equals the reference engine bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from host_kernels import (
    BROKEN_CU_SEQLENS,
    HAS_GXX,
    SANITIZERS,
    HostKernels,
    KernelFailure,
    compile_library,
    compile_with_removable_barriers,
    run_replay,
    run_sanitized,
    sanitizer_runtime,
)

import pageweaver_sglang as pw
from pageweaver_sglang.plan import group_bound
from tests.generators import CASE_NAMES, make_case

pytestmark = pytest.mark.skipif(not HAS_GXX, reason="no g++ on PATH")

DATA = Path(__file__).parents[1] / "data"
WORKLOADS = ["ctx8k", "ctx16k", "ctx32k_chunk2", "ctx64k_a", "ctx64k_flat", "ctx64k_mixed", "ctx128k", "packed"]
ARRAYS = ("pages", "masks", "counts", "queries", "limits")


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


def int32(values):
    return torch.tensor(np.asarray(values), dtype=torch.int32)


def reference(topk, perm, cu_seqlens, seq_lens, prefix_lens, **options):
    plan = pw.reference.prepare_unions(
        torch.from_numpy(np.ascontiguousarray(topk)),
        None if perm is None else int32(perm),
        int32(cu_seqlens),
        int32(seq_lens),
        int32(prefix_lens),
        **options,
    )
    return {name: getattr(plan, name).numpy() for name in ARRAYS}


def expected_slots(plan, topk_arguments, *, req_to_token, slot_ids, num_pool_pages, page_size):
    """What ``slots`` must be for the pages of ``plan``, entry by entry."""
    cu_seqlens = topk_arguments[2]
    slots = np.full_like(plan["pages"], -1)
    for head, group, entry in np.argwhere(plan["pages"] >= 0):
        members = plan["queries"][head, group]
        request = int(np.searchsorted(cu_seqlens, members[members >= 0][0], side="right")) - 1
        row, position = req_to_token[slot_ids[request]], int(plan["pages"][head, group, entry]) * page_size
        if position < len(row) and row[position] % page_size == 0 and 0 <= row[position] < num_pool_pages * page_size:
            slots[head, group, entry] = row[position] // page_size
    return slots


def expected_marks(plan, topk_arguments, before, *, page_size):
    """What the marks must be: over the pages that some group can read, the most tokens that a request has there."""
    cu_seqlens, seq_lens = topk_arguments[2:4]
    marks = before.copy()
    for head, group, entry in np.argwhere(plan["slots"] >= 0):
        members = plan["queries"][head, group]
        request = int(np.searchsorted(cu_seqlens, members[members >= 0][0], side="right")) - 1
        tokens = min(page_size, int(seq_lens[request]) - int(plan["pages"][head, group, entry]) * page_size)
        slot = plan["slots"][head, group, entry]
        marks[head, slot] = max(marks[head, slot], tokens)
    return marks


def assert_matches(kernels, arguments, *, pool=None, extra_groups=3, seed=0, **options):
    """Compare with the reference, spare groups included; ``pool``: also look up physical pages. Return the plan."""
    options = {"window": 128, "group_size": 8, "page_size": 128, **options}
    topk, prefix_lens = arguments[0], arguments[4]
    groups = group_bound(topk.shape[1], len(prefix_lens), options["window"], options["group_size"])
    if pool:  # the same plan whether pages are marked or not
        before = np.zeros((len(topk), pool["num_pool_pages"]), np.int32)
        plain = kernels.union_prep(*arguments, groups=groups + extra_groups, seed=seed, **options, **pool)
        pool = {**pool, "marks": before}
    plan = kernels.union_prep(*arguments, groups=groups + extra_groups, seed=seed, **options, **(pool or {}))
    for name, right in reference(*arguments, **options).items():
        assert plan[name].dtype == right.dtype
        np.testing.assert_array_equal(plan[name][:, :groups], right, err_msg=name)
    for name, spare in {"pages": -1, "masks": 0, "counts": 0, "queries": -1, "limits": -1}.items():
        assert (plan[name][:, groups:] == spare).all(), name
    assert plan["queue"].tolist() == [0, 0]
    if pool:
        assert all((plan[name] == array).all() for name, array in plain.items())
        del pool["marks"]
        right = expected_slots(plan, arguments, **pool, page_size=options["page_size"])
        np.testing.assert_array_equal(plan["slots"], right)
        right = expected_marks(plan, arguments, before, page_size=options["page_size"])
        np.testing.assert_array_equal(plan["marks"], right)
    return plan


def shuffled_windows(rng, cu_seqlens, heads, tokens, window):
    """A permutation of ids inside every window, padding rows in place."""
    perm = np.tile(np.arange(tokens, dtype=np.int32), (heads, 1))
    for head in range(heads):
        for begin, end in itertools.pairwise(cu_seqlens):
            for first in range(begin, end, window):
                rng.shuffle(perm[head, first : min(first + window, end)])
    return perm


def hostile(seed, *, max_requests=6, max_length=150):
    """A random call: ids unsorted, repeated, negative and too large, empty requests, padding, odd shapes."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, max_length, rng.integers(1, max_requests + 1))
    lengths *= rng.random(len(lengths)) < 0.8
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = int(cu_seqlens[-1]) + int(rng.integers(0, 40))
    page_size = int(rng.choice([8, 64, 128]))
    prefix_lens = rng.integers(0, 1 << rng.integers(3, 30), len(lengths)).astype(np.int32)
    seq_lens = np.maximum(prefix_lens + lengths - rng.integers(0, 30, len(lengths)), 0).astype(np.int32)
    top = int(prefix_lens.max() + max_length) // page_size
    if rng.random() < 0.7:
        top = min(top, int(rng.integers(1, 200)))
    heads = int(rng.integers(1, 4))
    topk = rng.integers(-3, top + 2, (heads, tokens, rng.integers(1, 17))).astype(np.int32)
    topk[rng.random(topk.shape) < 0.1] = rng.choice([-1, np.iinfo(np.int32).min, np.iinfo(np.int32).max])
    options = {
        "window": int(rng.choice([1, 7, 50, 64, 128, 1000])),
        "group_size": int(rng.integers(1, 17)),
        "page_size": page_size,
    }
    perm = shuffled_windows(rng, cu_seqlens, heads, tokens, options["window"]) if rng.random() < 0.7 else None
    return (topk, perm, cu_seqlens, seq_lens, prefix_lens), options


@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads(kernels, workload, window):
    w = pw.load_workload(DATA / f"{workload}.npz")
    topk, lengths = w.topk_idx.numpy(), [x.numpy() for x in (w.cu_seqlens, w.seq_lens, w.prefix_lens)]
    for group_size in (8, 4, 16):
        options = {"window": window, "group_size": group_size}
        perm = pw.reference.regroup(w.topk_idx, w.cu_seqlens, w.prefix_lens, **options).numpy()
        for order in (perm, None):
            assert_matches(kernels, (topk, order, *lengths), **options)


@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("name", ["packed", "holes", "padded", "cut_short", "heads4", "past_512_pages"])
def test_groups_of_16_are_two_neighbours_of_an_order_of_groups_of_8(kernels, name, window):
    """As the engine ``stream`` has them for few heads: the halves' unions in one, the second half's bits behind."""
    case = make_case(name, seed=6)
    perm = pw.reference.regroup(case.topk_idx, case.cu_seqlens, case.prefix_lens, window=window, group_size=8)
    tensors = (case.topk_idx, perm, case.cu_seqlens, case.seq_lens, case.prefix_lens)
    plan = assert_matches(kernels, tuple(x.numpy() for x in tensors), window=window, group_size=16)
    eights = reference(*(x.numpy() for x in tensors), window=window, group_size=8, page_size=128)
    for head, groups in enumerate(eights["queries"]):
        halves = {(-1,) * 8: {}}
        for group, queries in enumerate(groups.tolist()):
            entries = zip(eights["pages"][head, group].tolist(), eights["masks"][head, group].tolist(), strict=True)
            halves.setdefault(tuple(queries), {page: mask for page, mask in entries if mask})
        for group in range(len(plan["queries"][head])):
            queries, count = plan["queries"][head, group].tolist(), plan["counts"][head, group]
            first, second = halves[tuple(queries[:8])], halves[tuple(queries[8:])]
            masks = {page: first.get(page, 0) | second.get(page, 0) << 8 for page in sorted({*first, *second})}
            assert plan["pages"][head, group, :count].tolist() == list(masks)
            assert plan["masks"][head, group, :count].tolist() == list(masks.values())


@pytest.mark.parametrize("name", CASE_NAMES)
def test_named_cases(kernels, name):
    for seed, group_size in ((0, 8), (1, 4), (2, 16), (3, 11)):
        case = make_case(name, seed=seed)
        perm = pw.reference.regroup(case.topk_idx, case.cu_seqlens, case.prefix_lens, group_size=group_size)
        arguments = (case.topk_idx, perm, case.cu_seqlens, case.seq_lens, case.prefix_lens)
        pool = {
            "req_to_token": case.req_to_token.numpy(),
            "slot_ids": case.slot_ids.numpy(),
            "num_pool_pages": case.k_cache.shape[0] // case.page_size,
        }
        arguments = tuple(x.numpy() for x in arguments)
        plan = assert_matches(kernels, arguments, pool=pool, group_size=group_size, page_size=case.page_size)
        assert (plan["slots"][plan["pages"] >= 0] >= 0).all()


@pytest.mark.parametrize("group_size", range(1, 17))
def test_group_sizes_and_windows(kernels, group_size):
    rng = np.random.default_rng(group_size)
    cu_seqlens = np.array([0, 70, 71, 71, 263])
    topk = rng.integers(0, 60, (2, 270, 16)).astype(np.int32)
    prefix_lens = np.array([7000, 0, 80, 7000])
    for window in (1, group_size, 10, 64, 127, 128, 4096, 2**31 // group_size * group_size - group_size):
        perm = shuffled_windows(rng, cu_seqlens, 2, 270, window)
        arguments = (topk, perm, cu_seqlens, prefix_lens + np.diff(cu_seqlens), prefix_lens)
        assert_matches(kernels, arguments, window=window, group_size=group_size)


@pytest.mark.parametrize("seed", range(60))
def test_hostile_inputs(kernels, seed):
    arguments, options = hostile(seed)
    assert_matches(kernels, arguments, **options, seed=seed % 3)


@pytest.mark.parametrize("top", [1 << 20, (1 << 28) - 1])
def test_large_page_ids(kernels, top):
    rng = np.random.default_rng(5)
    topk = (top - 1 - rng.integers(0, 40, (1, 64, 16))).astype(np.int32)
    topk[:, ::5, 0] = top  # one too large
    arguments = (topk, None, [0, 64], [top * 4], [top * 4 - 64])
    plan = assert_matches(kernels, arguments, page_size=4)
    assert plan["pages"].max() == top - 1


def test_full_and_empty_unions(kernels):
    """128 (256) different pages in a group, one page only, none at all."""
    rng = np.random.default_rng(6)
    topk = np.concatenate(
        [rng.permutation(1000)[:128].reshape(8, 16), np.full((8, 16), 7), np.full((8, 16), -1), np.full((1, 16), 2000)]
    )
    plan = assert_matches(kernels, (topk[None].astype(np.int32), None, [0, 25], [128_000], [127_000]))
    assert plan["counts"][0, :4].tolist() == [128, 1, 0, 0]
    assert plan["masks"][0, 1, 0] == 0xFF
    topk = np.concatenate([rng.permutation(1000)[:256].reshape(16, 16), np.full((16, 16), 7)])
    plan = assert_matches(kernels, (topk[None].astype(np.int32), None, [0, 32], [128_000], [127_000]), group_size=16)
    assert plan["counts"][0, :2].tolist() == [256, 1]
    assert plan["masks"][0, 1, 0] == 0xFFFF


@pytest.mark.parametrize("group_size", [8, 16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pages_by_rounds_of_4096(kernels, group_size, seed):
    """Ids on both sides of the rounds' borders, rounds without an id, one id in each of many rounds, ids too large."""
    rng = np.random.default_rng(seed)
    pages = 4096 * 300 + 17
    borders = 4096 * rng.integers(0, 301, (1, 4 * group_size, 16)) + rng.integers(-2, 3, (1, 4 * group_size, 16))
    edges = [4095, 4096, 8191, 8192, pages - 1, pages, -1]
    borders[0, group_size : 2 * group_size] = rng.choice(edges, (group_size, 16))
    borders[0, 2 * group_size : 3 * group_size] = 4096 * rng.permutation(300)[: 16 * group_size].reshape(-1, 16)
    tokens = borders.shape[1]
    for length in (pages * 8, 4096 * 8, 4096 * 8 + 1, 4096 * 8 - 1):
        arguments = (borders.astype(np.int32), None, [0, tokens], [length], [length - tokens])
        assert_matches(kernels, arguments, group_size=group_size, page_size=8, seed=seed)


@pytest.mark.parametrize("requests", [31, 32, 33, 300])
def test_many_tiny_requests(kernels, requests):
    rng = np.random.default_rng(requests)
    lengths = rng.integers(0, 10, requests)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    topk = rng.integers(-1, 40, (2, cu_seqlens[-1] + 5, 8)).astype(np.int32)
    prefix_lens = rng.integers(0, 4000, requests)
    arguments = (topk, None, cu_seqlens, prefix_lens + lengths, prefix_lens)
    for window, group_size in ((128, 8), (4, 3)):
        assert_matches(kernels, arguments, window=window, group_size=group_size)


def test_sequence_of_almost_2_to_the_31_tokens(kernels):
    longest = 2**31 - 1
    topk = np.random.default_rng(3).integers(2**24 - 40, 2**24 + 2, (1, 20, 16)).astype(np.int32)
    plan = assert_matches(kernels, (topk, None, [0, 20], [longest], [longest - 20]))
    assert plan["pages"].max() == 2**24 - 1
    assert plan["limits"].max() == longest - 1


@pytest.mark.parametrize("cu_seqlens", BROKEN_CU_SEQLENS)
def test_broken_cu_seqlens_list_only_rows_of_the_call(kernels, cu_seqlens):
    topk = np.random.default_rng(0).integers(-2, 90, (2, 100, 16)).astype(np.int32)
    requests = len(cu_seqlens) - 1
    plan = kernels.union_prep(topk, None, cu_seqlens, [5000] * requests, [4900] * requests, groups=40)
    assert plan["queries"].min() >= -1
    assert plan["queries"].max() < 100


def test_padding_rows_and_no_rows(kernels):
    """Padding rows are listed whatever ``perm`` says of them; a call without rows fills its spare groups."""
    topk = np.zeros((2, 37, 16), np.int32)
    perm = np.full((2, 37), 5, np.int32)
    plan = assert_matches(kernels, (topk, perm, [0, 0, 0], [900, 0], [900, 0]))
    assert sorted(plan["queries"][0][plan["queries"][0] >= 0]) == list(range(37))
    assert_matches(kernels, (topk[:, :0], None, [0, 0], [0], [0]))


def test_ids_of_perm_outside_the_request_are_empty_slots(kernels):
    """They would read rows that do not exist, or that belong to another request."""
    topk = np.tile(np.arange(16, dtype=np.int32), (1, 24, 1))
    perm = np.arange(24, dtype=np.int32)[None].copy()
    bad = {0: -1, 3: 24, 5: 2**31 - 1, 7: -(2**31), 9: 16}
    for place, value in bad.items():
        perm[0, place] = value
    plan = kernels.union_prep(topk, perm, [0, 16, 24], [2048, 2048], [2032, 2040], groups=3)
    queries = np.arange(24)
    queries[list(bad)] = -1
    np.testing.assert_array_equal(plan["queries"].reshape(-1), queries)
    assert (plan["limits"].reshape(-1)[list(bad)] == -1).all()
    members = [0xFF & ~(1 << 0 | 1 << 3 | 1 << 5 | 1 << 7), 0xFF & ~(1 << 1), 0xFF]
    np.testing.assert_array_equal(plan["masks"][0, :, :16], np.repeat([members], 16, axis=0).T)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_physical_pages_that_cannot_be_read(kernels, dtype):
    """A first slot that starts no page, that is negative or behind the pool, a position behind the table's row."""
    page_size, pool_pages = 16, 50
    topk = np.arange(16, dtype=np.int32)[None, None].repeat(8, axis=1)
    table = np.full((4, 10 * page_size), -9, np.int32)
    first_slots = [0, 16 * 49, 16 * 50, 8, -16, -1, 2**31 - 16, 2**31 - 1, 33, 48]
    table[2, ::page_size] = first_slots
    pool = {"req_to_token": table, "slot_ids": np.array([2], dtype), "num_pool_pages": pool_pages}
    arguments = (topk, None, [0, 8], [16 * page_size], [16 * page_size - 8])
    plan = assert_matches(kernels, arguments, pool=pool, page_size=page_size)
    assert plan["slots"][0, 0, :16].tolist() == [0, 49, -1, -1, -1, -1, -1, -1, -1, 3] + [-1] * 6
    # In front of and behind the table given, and beside its rows, lie pages that could be read.
    around = np.tile(np.arange(table.shape[1], dtype=np.int32), (4, 1))
    for row in (-1, 2):
        outside = {**pool, "req_to_token": around[1:3], "slot_ids": np.array([row], dtype)}
        plan = kernels.union_prep(*arguments, groups=1, page_size=page_size, **outside)
        assert (plan["slots"] == -1).all()
    narrow = {**pool, "req_to_token": around[1:3, : 4 * page_size], "slot_ids": np.array([1], dtype)}
    plan = kernels.union_prep(*arguments, groups=1, page_size=page_size, **narrow)
    assert plan["slots"][0, 0, :16].tolist() == [0, 1, 2, 3] + [-1] * 12


def shared_page():
    """Arguments and pool of two requests of 300 and 270 tokens whose third pages are one: 44 and 14 tokens of it."""
    topk = np.tile(np.array([0, 1, 2, 3], np.int32), (2, 24, 1))
    topk[1, :, 2] = -1  # the second head picks only what is the requests' own, and nothing behind their ends
    table = np.zeros((2, 4 * 128), np.int32)
    for row, pages in enumerate(([4, 1, 7, 9], [2, 5, 7, 8])):
        table[row] = (np.array(pages)[:, None] * 128 + np.arange(128)).reshape(-1)
    pool = {"req_to_token": table, "slot_ids": np.arange(2), "num_pool_pages": 10}
    return (topk, None, [0, 16, 24], [300, 270], [284, 262]), pool


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("swapped", [False, True])
def test_marks_say_how_many_tokens_of_a_page_belong_to_a_request(kernels, seed, swapped):
    """The longer request decides, whoever comes first, and unread pages keep what they have."""
    (topk, perm, cu_seqlens, seq_lens, prefix_lens), pool = shared_page()
    if swapped:
        cu_seqlens, seq_lens, prefix_lens = [0, 8, 24], seq_lens[::-1], prefix_lens[::-1]
        pool["slot_ids"] = pool["slot_ids"][::-1].copy()
    arguments = (topk, perm, cu_seqlens, seq_lens, prefix_lens)
    plan = assert_matches(kernels, arguments, pool=pool, seed=seed)
    marks = np.zeros((2, 10), np.int32)
    marks[:, [4, 1, 2, 5]] = 128
    marks[0, 7] = 44
    np.testing.assert_array_equal(plan["marks"], marks)
    # Marks only rise: a page that is wholly some request's stays so.
    before = np.zeros((2, 10), np.int32)
    before[0] = [3, 0, 0, 0, 0, 0, 0, 128, 0, 128]
    plan = kernels.union_prep(*arguments, groups=6, marks=before, seed=seed, **pool)
    np.testing.assert_array_equal(plan["marks"], np.maximum(marks, before))


@pytest.mark.parametrize("group_size", [8, 16])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_marks_of_pages_that_share_an_entry_of_the_table(kernels, group_size, seed):
    """Physical pages that are 1024 apart, in groups of one CTA and of several, each picked once or often."""
    rng = np.random.default_rng(seed)
    page_size, pool_pages, tokens = 4, 5000, 300
    physical = np.concatenate([rng.permutation(pool_pages)[:30], *(np.arange(7, 40) + 1024 * i for i in range(4))])
    rng.shuffle(physical)
    table = (physical[:, None] * page_size + np.arange(page_size)).reshape(1, -1).astype(np.int32)
    topk = rng.integers(0, len(physical), (2, tokens, 16)).astype(np.int32)
    pool = {"req_to_token": table, "slot_ids": np.zeros(1, np.int32), "num_pool_pages": pool_pages}
    length = table.shape[1] - 1
    arguments = (topk, None, [0, tokens], [length], [length - tokens])
    plan = assert_matches(kernels, arguments, pool=pool, group_size=group_size, page_size=page_size, seed=seed)
    assert (plan["marks"] > 0).sum() > 200


def test_pages_that_cannot_be_read_are_not_marked(kernels):
    (topk, perm, *lengths), pool = shared_page()
    pool["req_to_token"][0, 128] = 128 + 1  # begins no page
    pool["req_to_token"][1, 0] = 10 * 128  # behind the pool
    plan = assert_matches(kernels, (topk, perm, *lengths), pool=pool)
    assert sorted(np.flatnonzero(plan["marks"][0])) == [4, 5, 7]
    pool["slot_ids"] = np.array([2, -1])  # no rows of the table
    plan = assert_marks_nothing(kernels, (topk, perm, *lengths), pool)
    assert (plan["slots"] == -1).all()
    padding = (np.zeros((1, 24, 4), np.int32), None, [0, 0, 0], [300, 270], [300, 270])
    assert_marks_nothing(kernels, padding, {**pool, "slot_ids": np.arange(2)})


def assert_marks_nothing(kernels, arguments, pool):
    before = np.full((len(arguments[0]), pool["num_pool_pages"]), 5, np.int32)
    plan = kernels.union_prep(*arguments, groups=6, marks=before, **pool)
    np.testing.assert_array_equal(plan["marks"], before)
    return plan


def test_strided_topk(kernels):
    """Head and row strides, and rows whose start is not a multiple of 16 bytes."""
    rng = np.random.default_rng(2)
    wide = rng.integers(0, 50, (5, 150, 41)).astype(np.int32)
    for topk in (wide[1:4, :130, :16], wide[::2, 10:, 3:18], wide[:, ::2, 8:24], wide[:, :, :1]):
        rows = topk.shape[1] - 3
        assert_matches(kernels, (topk, None, [0, rows], [50 * 128], [50 * 128 - rows]))


@pytest.mark.parametrize("options", [{"window": 0}, {"group_size": 0}, {"group_size": 17}, {"page_size": 0}])
def test_launcher_refuses(kernels, options):
    with pytest.raises(KernelFailure, match="invalid value"):
        kernels.union_prep(np.zeros((1, 4, 16), np.int32), None, [0, 4], [4], [0], groups=1, **options)


def test_divisors(kernels):
    """One multiplication is an exact division: around multiples of the divisor, up to 2^31 - 1."""
    top = 2**31 - 1
    divisors = {*range(1, 70), 127, 128, 129, 641, 65535, 65536, 65537, 2**30 - 1, 2**30, 2**30 + 1, top - 1, top}
    for divisor in divisors | set(np.random.default_rng(0).integers(1, top, 50).tolist()):
        multiples = [divisor * m for m in (0, 1, 2, 3, 1000, top // divisor // 2, top // divisor - 1, top // divisor)]
        numbers = {m + d for m in multiples for d in (-1, 0, 1)} | {0, top}
        for n in (n for n in numbers if 0 <= n <= top):
            assert kernels.divide(n, divisor) == n // divisor, (n, divisor)


# ----------------------------------------------------------------- What the shim finds, and that it can find it
def test_shuffled_order_shows_every_missing_barrier(tmp_path):
    library, barriers = compile_with_removable_barriers(tmp_path, "union_prep.cuh", "__syncwarp();")
    cases = []
    for seed in range(1, 9):
        arguments, options = hostile(seed)
        if seed > 4:  # large unions, in two rounds
            wide = np.random.default_rng(seed).permutation(5000)[: 16 * 128].reshape(1, 128, 16).astype(np.int32)
            arguments = (wide, None, [0, 128], np.array([640_000]), np.array([639_872]))
            options = {"window": 128, "group_size": 8, "page_size": 128}
        groups = group_bound(arguments[0].shape[1], len(arguments[4]), options["window"], options["group_size"])
        right = {name: array[:, :groups] for name, array in reference(*arguments, **options).items()}
        cases.append(("union_prep", arguments, {**options, "groups": groups, "seed": seed}, right))
    complete = run_replay(library, cases, str(barriers))  # none has that number
    assert complete.returncode == 0, complete.stderr
    assert barriers == 4
    unnoticed = [i for i in range(barriers) if run_replay(library, cases, str(i)).returncode == 0]
    assert unnoticed == []


def test_marks_are_written_when_all_groups_of_the_block_are_done(tmp_path):
    """The second barrier; the first, behind the clearing of the table, has the whole kernel to hide behind."""
    library, barriers = compile_with_removable_barriers(tmp_path, "union_prep.cuh", "__syncthreads();")
    assert barriers == 2
    topk = np.random.default_rng(0).permutation(2048).reshape(1, 128, 16).astype(np.int32)
    options = {
        "req_to_token": np.arange(2048 * 4, dtype=np.int32)[None],
        "slot_ids": np.zeros(1, np.int32),
        "num_pool_pages": 2048,
        "marks": np.zeros((1, 2048), np.int32),
        "page_size": 4,
        "groups": 16,
    }
    right = {"marks": np.full((1, 2048), 4, np.int32)}
    arguments = (topk, None, [0, 128], [2048 * 4], [2048 * 4 - 128])
    cases = [("union_prep", arguments, {**options, "seed": seed}, right) for seed in range(1, 4)]
    assert run_replay(library, cases, str(barriers)).returncode == 0
    assert run_replay(library, cases, "1").returncode != 0


def test_no_two_lanes_store_to_the_same_place(kernels):
    kernels.find_races(True)
    try:
        for seed in range(6):
            arguments, options = hostile(seed)
            assert_matches(kernels, arguments, seed=seed % 3, **options)
    finally:
        kernels.find_races(False)


@pytest.mark.skipif(sanitizer_runtime() is None, reason="g++ has no AddressSanitizer runtime here")
def test_no_access_out_of_bounds(kernels, tmp_path):
    cases = []
    rng = np.random.default_rng(8)
    for seed in range(100, 120):
        (topk, perm, *lengths), options = hostile(seed)
        if perm is not None:
            perm[rng.random(perm.shape) < 0.1] = rng.choice([-1, topk.shape[1], 2**31 - 1, -(2**31)])
        groups = group_bound(topk.shape[1], len(lengths[2]), options["window"], options["group_size"])
        table = rng.integers(-5, 1 << 20, (len(lengths[2]), 300)).astype(np.int32)
        pool = {"req_to_token": table, "slot_ids": np.arange(len(table)), "num_pool_pages": 500}
        pool["marks"] = np.zeros((len(topk), 500), np.int32)
        options = {**options, **pool, "groups": groups}
        arguments = (topk, perm, *lengths)
        cases.append(("union_prep", arguments, options, kernels.union_prep(*arguments, **options)))
    topk = rng.integers(-2, 90, (2, 100, 16)).astype(np.int32)
    for cu_seqlens in BROKEN_CU_SEQLENS:
        requests = len(cu_seqlens) - 1
        arguments = (topk, None, cu_seqlens, [5000, -(2**30), 1_000_000][:requests], [4900, 2**30, -(2**30)][:requests])
        options = {
            "groups": group_bound(100, requests, 64, 8),
            "window": 64,
            **pool,
            "slot_ids": np.zeros(requests, int),
            "marks": np.zeros((2, 500), np.int32),
        }
        cases.append(("union_prep", arguments, options, kernels.union_prep(*arguments, **options)))
    result = run_sanitized(compile_library(tmp_path, *SANITIZERS), cases)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "replayed" in result.stdout

"""The value tiles: V's marked pages transposed, byte by byte, and what must not come through them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_support import HAS_CUDA, attend, poisoned_tiles, same_bits

import pageweaver_sglang as pw
from pageweaver_sglang.bench.accuracy import nrms
from pageweaver_sglang.plan import UnionPlan
from tests.generators import make_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]

FP8_NRMS = 0.04
POISON = 0xA5
NANS = (0x7F, 0xFF)


def tile_order() -> torch.Tensor:
    """For every byte of a tile the byte of the page [token, dim] that it holds, by the order that kernels/ document.

    Inside blocks of 16 tokens, position 4t + {0, 1, 2, 3} holds tokens 2t, 2t + 1, 8 + 2t, 8 + 2t + 1; inside blocks of
    16 dims, row c holds dim 2c and row 8 + c dim 2c + 1; 16-byte chunk c of row r lies at chunk c ^ (r % 8).
    """
    order = torch.empty(128 * 128, dtype=torch.long)
    for row in range(128):
        block, c = row // 16 * 16, row % 16
        dim = block + (2 * c if c < 8 else 2 * (c - 8) + 1)
        for position in range(128):
            chunk, p = position // 16, position % 16
            token = chunk * 16 + 2 * (p // 4) + p % 2 + (8 if p % 4 >= 2 else 0)
            order[row * 128 + (chunk ^ (row % 8)) * 16 + p] = token * 128 + dim
    return order


def test_the_order_is_a_permutation():
    assert torch.equal(tile_order().sort().values, torch.arange(128 * 128))


def expected_tiles(pages: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Tiles of ``pages``, uint8 [n, 128 tokens, 128 dims], of which ``tokens`` [n] tokens are some request's."""
    nan = (pages == NANS[0]) | (pages == NANS[1])
    behind = torch.arange(128, device=pages.device) >= tokens[:, None]
    clean = pages.masked_fill(nan & behind[:, :, None], 0)
    return clean.flatten(1)[:, tile_order().to(pages.device)]


def random_cache(pool_pages: int, kv_heads: int, layout: str, seed: int = 0) -> torch.Tensor:
    """Random bytes, every E4M3 value and both NaN among them, float8_e4m3fn [pool_pages * 128, kv_heads, 128]."""
    random = torch.Generator(device="cuda").manual_seed(seed)
    slots = pool_pages * 128
    if layout == "beside K":  # one row holds a token's K and V
        shape = (slots, 2 * kv_heads, 128)
    elif layout == "heads apart":
        shape = (kv_heads, slots, 128)
    else:
        shape = (slots, kv_heads, 128)
    values = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=random)
    if layout == "beside K":
        values = values[:, kv_heads:]
    elif layout == "heads apart":
        values = values.transpose(0, 1)
    return values.view(torch.float8_e4m3fn)


def some_plan(v_cache, groups=1):
    """A plan of ``groups`` groups for tests of the tiles alone: page counts of 0 to 128, the counters in use."""
    kv_heads = v_cache.shape[1]
    plan = UnionPlan.empty(
        kv_heads, 8 * groups, 0, 16, window=128, group_size=8, page_size=128, device="cuda", with_slots=True
    )
    random = torch.Generator(device="cuda").manual_seed(groups)
    plan.counts.copy_(torch.randint(0, 129, plan.counts.shape, device="cuda", generator=random))
    plan.queue.fill_(-7)
    return plan


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("groups", [1, 2, 127, 128, 129, 1909, 8200])
def test_groups_are_ordered_by_pages(groups, kv_heads):
    """Each KV head's groups from most pages to fewest; the heads take turns; the counters are left alone."""
    from pageweaver_sglang.cuda import ops

    v_cache = random_cache(3, kv_heads, "plain")
    plan = some_plan(v_cache, groups)
    ops.value_tiles(v_cache, poisoned_tiles(v_cache), plan)
    assert plan.queue[:2].tolist() == [-7, -7]
    order = plan.queue[2:].view(-1, kv_heads).T
    counts = plan.counts.shape[1]
    heads = torch.arange(kv_heads, device="cuda")[:, None]
    assert torch.equal(order.sort(dim=1).values, heads * counts + torch.arange(counts, device="cuda"))
    pages = plan.counts.gather(1, order.long() - heads * counts)
    assert bool((pages[:, 1:] <= pages[:, :-1]).all())


@pytest.mark.parametrize("layout", ["plain", "beside K", "heads apart"])
@pytest.mark.parametrize(
    ("pool_pages", "kv_heads", "share"),
    [(1, 1, 1.0), (2, 4, 0.5), (131, 1, 1.0), (529, 1, 0.3), (700, 4, 0.7), (16_384, 4, 0.05), (70_001, 1, 0.01)],
)
def test_marked_pages_and_no_others(pool_pages, kv_heads, share, layout):
    from pageweaver_sglang.cuda import ops

    v_cache = random_cache(pool_pages, kv_heads, layout)
    tiles = poisoned_tiles(v_cache, POISON)
    random = torch.Generator(device="cuda").manual_seed(1)
    shape = tiles.marks.shape
    tokens = torch.randint(1, 129, shape, dtype=torch.int32, device="cuda", generator=random)
    marked = torch.rand(shape, device="cuda", generator=random) < share
    marked[:, [0, -1]] = True
    tiles.marks.copy_(tokens * marked)
    ops.value_tiles(v_cache, tiles, some_plan(v_cache))
    assert not bool(tiles.marks.any())
    assert bool((tiles.tiles[~marked] == POISON).all())
    heads, pages = marked.nonzero(as_tuple=True)
    values = v_cache.view(torch.uint8).unflatten(0, (pool_pages, 128))
    for some in torch.arange(len(heads), device="cuda").split(2048):
        head, page = heads[some], pages[some]
        expected = expected_tiles(values[page, :, head], tokens[head, page])
        assert torch.equal(tiles.tiles[head, page], expected)


def test_every_number_of_tokens():
    """Bytes that are NaN stay where a request has tokens, and become zero behind them."""
    from pageweaver_sglang.cuda import ops

    v_cache = torch.full((128 * 128, 1, 128), NANS[0], dtype=torch.uint8, device="cuda")
    v_cache[::2] = NANS[1]
    v_cache[:, :, ::5] = 0x7E  # 448, the largest number
    tiles = poisoned_tiles(v_cache, POISON)
    tokens = torch.arange(1, 129, dtype=torch.int32, device="cuda")
    tiles.marks.copy_(tokens)
    ops.value_tiles(v_cache.view(torch.float8_e4m3fn), tiles, some_plan(v_cache))
    expected = expected_tiles(v_cache.view(128, 128, 128), tokens)
    assert torch.equal(tiles.tiles[0], expected)
    zeros = (tiles.tiles[0] == 0).sum(dim=1)
    assert torch.equal(zeros, (128 - tokens.long()) * int((torch.arange(128) % 5 != 0).sum()))


def test_no_marks_write_nothing():
    from pageweaver_sglang.cuda import ops

    v_cache = random_cache(300, 2, "plain")
    tiles = poisoned_tiles(v_cache, POISON)
    ops.value_tiles(v_cache, tiles, some_plan(v_cache))
    assert bool((tiles.tiles == POISON).all())


def garbage_behind_the_ends(case, byte):
    """``case`` with ``byte`` in every cell of the pool that is no request's token."""
    owned = torch.zeros(case.k_cache.shape[0], dtype=torch.bool, device="cuda")
    for request, length in enumerate(case.seq_lens.tolist()):
        owned[case.req_to_token[case.slot_ids[request].long(), :length].long()] = True
    caches = {}
    for name in ("k_cache", "v_cache"):
        values = getattr(case, name).view(torch.uint8).clone()
        values[~owned] = byte
        caches[name] = values.view(torch.float8_e4m3fn)
    return dataclasses.replace(case, **caches)


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x7E, 0xFE])
@pytest.mark.parametrize("name", ["tail", "packed", "heads4", "cut_short", "future"])
def test_garbage_behind_the_ends_reaches_no_output(name, byte):
    case = make_case(name, seed=5, device="cuda")
    assert same_bits(attend(garbage_behind_the_ends(case, byte)), attend(case))
    assert same_bits(attend(garbage_behind_the_ends(case, byte), window=None), attend(case, engine="union8"))


@pytest.mark.parametrize("lengths", [(300, 270), (270, 300)])
def test_a_page_shared_by_requests_of_different_lengths(lengths):
    """Behind the longer one's end the page holds NaN; the shorter one sees its own part of it only."""
    requests = tuple((14, length - 14) for length in lengths)
    case = make_case("packed", seed=6, device="cuda", requests=requests, kv_heads=4)
    order = sorted(range(2), key=lambda request: int(case.seq_lens[request]))
    shorter, longer = (case.slot_ids[request].long() for request in order)
    table = case.req_to_token.clone()
    length = int(case.seq_lens[order[0]])
    table[shorter, 256:length] = table[longer, 256:length]
    case = garbage_behind_the_ends(dataclasses.replace(case, req_to_token=table), 0x7F)
    out = attend(case)
    assert bool(torch.isfinite(out).all())
    assert nrms(out, pw.reference.sparse_prefill(*case.args())) <= FP8_NRMS


def test_one_workspace_for_pools_of_different_sizes():
    """Of four KV heads: another pool's pages lie elsewhere in the same memory."""
    cases = [make_case("heads4", seed=seed, device="cuda", requests=requests) for seed, requests in (
        (7, ((70, 2900), (30, 2100))),
        (8, ((9, 400),)),
        (9, ((40, 1300), (5, 5000))),
    )]  # fmt: skip
    tokens, pools = (max(sizes) for sizes in ([len(c.q) for c in cases], [c.k_cache.shape[0] // 128 for c in cases]))
    for pool_pages in (pools, None):
        workspace = pw.Workspace(tokens, 4, kv_heads=4, topk=16, q_heads=64, pool_pages=pool_pages, device="cuda")
        for case in [*cases, *reversed(cases)]:
            out = pw.sparse_prefill(
                *case.args(), config=pw.Config(mode="pageweaver", guard="none"), workspace=workspace
            )
            assert same_bits(out, attend(case))


def test_marks_that_a_failed_call_left_behind_do_not_matter():
    case = make_case("tail", seed=10, device="cuda", tail=37)
    dirty = garbage_behind_the_ends(case, 0x7F)
    pool_pages = case.k_cache.shape[0] // 128
    tiles = pw.ValueTiles.empty(1, pool_pages, device="cuda")
    tiles.begin().fill_(128)  # and no end
    out = pw.sparse_prefill(*dirty.args(), config=pw.Config(mode="pageweaver", guard="none"), value_tiles=tiles)
    assert same_bits(out, attend(case))
    assert not bool(tiles.marks.any())


def test_layers_share_one_set_of_tiles():
    """As in a server: the same pages of other caches, one call after the other."""
    case = make_case("heads4", seed=11, device="cuda")
    tiles = pw.ValueTiles.empty(4, case.k_cache.shape[0] // 128, device="cuda")
    layers = [case, dataclasses.replace(case, v_cache=case.v_cache.flip(0)), case]
    outputs = [
        pw.sparse_prefill(*c.args(), config=pw.Config(mode="pageweaver", guard="none"), value_tiles=tiles)
        for c in layers
    ]
    for out, layer in zip(outputs, layers, strict=True):
        assert same_bits(out, attend(layer, engine="union8"))


def test_a_nan_that_a_query_sees_is_not_hidden():
    """A visible NaN in V is the caller's: it reaches the queries that attend to it, as in SGLang's own Step 3."""
    case = make_case("prefix", seed=12, device="cuda")
    page = int(case.topk_idx[0, 0, 0])
    slot = int(case.req_to_token[case.slot_ids[0].long(), page * 128 + 5])
    values = case.v_cache.view(torch.uint8).clone()
    values[slot, :, 9] = 0x7F
    out = attend(dataclasses.replace(case, v_cache=values.view(torch.float8_e4m3fn)))
    assert bool(out[0, :, 9].isnan().all())

"""The attention engines at the edges: page tables, ids, cache layouts and logits that real calls rarely hold.

Bits are compared between the engines and between orders of queries, and values with the float64 reference.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_support import HAS_CUDA, attend, plan_with_slots, poisoned_tiles, same_bits
from rounded_queries import rounded_q
from test_gpu_engines import agreed_output, one_request, reference, some_pages

import pageweaver_sglang as pw
from pageweaver_sglang.bench.accuracy import exact_rows, nrms, sample_rows
from tests.generators import Case, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]

DEVICE = "cuda"
PAGE = 128
FP8_NRMS = 0.04
ONE_ROUNDING = 0.0625  # of a probability to E4M3, when nothing averages it out
NAN = 0x7F
# window (None: the original order), group size, engine
WAYS = [
    (None, 8, "stream"),
    (64, 8, "stream"),
    (128, 8, "stream"),
    (None, 8, "union8"),
    (128, 8, "union8"),
    (128, 4, "union8"),
]
WAYS_OF_8_HEADS = [*WAYS, (None, 16, "stream"), (64, 16, "stream"), (128, 16, "stream")]
every_tile = pytest.mark.parametrize(("ratio", "ways"), [(16, WAYS), (8, WAYS_OF_8_HEADS)], ids=["16 heads", "8 heads"])


# ---------------------------------------------------------------- Pages that cannot be read

# What stands in a page's first entry of req_to_token: from the entry that belongs there and the pool's size in slots.
ENTRIES = {
    "minus one": lambda first, slots: -1,
    "minus a page": lambda first, slots: -PAGE,
    "the least": lambda first, slots: -(2**31),
    "a token on": lambda first, slots: first + 1,
    "half a page on": lambda first, slots: first + PAGE // 2,
    "a token back": lambda first, slots: first - 1,
    "the first behind the pool": lambda first, slots: slots,
    "far behind the pool": lambda first, slots: slots + 4096 * PAGE,
    "the largest page": lambda first, slots: 2**31 - PAGE,
    "the largest": lambda first, slots: 2**31 - 1,
}


def with_unreadable_pages(case: Case, entry, share: float) -> tuple[Case, Case, torch.Tensor]:
    """Make about ``share`` of every request's pages unreadable, the first one's last page among them.

    All that queries 8 to 15 of KV head 0 picked are such pages (a group whose union is not empty and holds nothing),
    and query 3 has one pick only, such a page. The first page of the pool, which belongs to nobody, is NaN.

    Returns:
        the case with the table that misleads; the same picks without those pages, over the sound table; and which rows
        picked one, bool ``[tokens, q_heads]``.
    """
    random = torch.Generator().manual_seed(5)
    picks, table = case.topk_idx.cpu().clone(), case.req_to_token.cpu()
    misleading = table.clone()
    slots = case.k_cache.shape[0]
    unreadable = torch.zeros(picks.shape, dtype=torch.bool)
    bounds = case.cu_seqlens.tolist()
    for request, length in enumerate(case.seq_lens.tolist()):
        pages = -(-length // PAGE)
        bad = torch.rand(pages, generator=random) < share
        bad[1], bad[-1] = True, request == 0
        ids = bad.nonzero().flatten().to(torch.int32)
        if request == 0:
            picks[0, 8:16] = -1
            picks[0, 8:16, :2] = ids[:2]
            picks[:, 3] = -1
            picks[:, 3, 2] = ids[0]
        row = int(case.slot_ids[request])
        for page in ids.tolist():
            misleading[row, page * PAGE] = entry(int(table[row, page * PAGE]), slots)
        own = slice(bounds[request], bounds[request + 1])
        unreadable[:, own] = torch.isin(picks[:, own], ids)
    caches = {}
    for name in ("k_cache", "v_cache"):
        values = getattr(case, name).view(torch.uint8).clone()
        values[:PAGE] = NAN
        caches[name] = values.view(torch.float8_e4m3fn)
    device = case.q.device
    case = dataclasses.replace(case, topk_idx=picks.to(device), **caches)
    misled = dataclasses.replace(case, req_to_token=misleading.to(device))
    without = dataclasses.replace(case, topk_idx=picks.masked_fill(unreadable, -1).to(device))
    rows = unreadable.any(dim=2).T.repeat_interleave(case.q.shape[1] // len(picks), dim=1)
    return misled, without, rows.to(device)


@every_tile
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("name", "share", "k"), [("heads4", 0.15, 5), ("prefix", 0.02, 16)])
def test_pages_that_cannot_be_read_contribute_nothing(name, share, k, entry, ratio, ways):
    """A query attends to the rest of its pages; who picked none of them keeps every bit.

    The reference, which resolves every token by itself, refuses such a table or follows it: it is given the picks that
    are left, over the sound table.
    """
    case = make_case(name, seed=61, device=DEVICE, k=k, ratio=ratio)
    misled, without, touched = with_unreadable_pages(case, ENTRIES[entry], share)
    sound = dataclasses.replace(misled, req_to_token=without.req_to_token)
    assert bool(touched.any())
    assert not bool(touched.all())
    expected = attend(without, window=None, engine="union8")
    assert nrms(expected, reference(without, rounded_q(without))) <= FP8_NRMS
    before = attend(sound, window=None, engine="union8")
    nothing = (without.topk_idx < 0).all(dim=2).T.repeat_interleave(ratio, dim=1)
    assert bool(nothing.any())
    for window, group_size, engine in ways:
        out = attend(misled, window=window, group_size=group_size, engine=engine)
        assert same_bits(out, expected), (window, group_size, engine)
        assert same_bits(out[~touched], before[~touched])
        assert bool((out[nothing] == 0).all())
    for engine in ("stream", "union8"):
        out = torch.full_like(case.q, float("nan"))
        assert same_bits(
            pw.sparse_prefill(*misled.args(), config=pw.Config(mode="pageweaver", engine=engine), out=out), expected
        )


@every_tile
def test_a_table_that_ends_before_the_sequence(ratio, ways):
    """Pages whose first token lies behind req_to_token's last column are not looked up."""
    case = make_case("heads4", seed=62, device=DEVICE, ratio=ratio)
    columns = 14 * PAGE + 1  # the first entry of page 14 is the last
    short = dataclasses.replace(case, req_to_token=case.req_to_token[:, :columns].contiguous())
    without = dataclasses.replace(case, topk_idx=case.topk_idx.masked_fill(case.topk_idx > 14, -1))
    assert bool((case.topk_idx > 14).any())
    assert bool((case.topk_idx == 14).any())
    expected = attend(without, window=None, engine="union8")
    assert nrms(expected, reference(without, rounded_q(without))) <= FP8_NRMS
    for window, group_size, engine in ways:
        assert same_bits(attend(short, window=window, group_size=group_size, engine=engine), expected)


@every_tile
@pytest.mark.parametrize("row", [-1, 7, 2**31, -(2**62)])
def test_rows_of_a_request_outside_the_table_are_zero(row, ratio, ways):
    """A slot id that is no row of req_to_token; the other request keeps every bit."""
    case = make_case("heads4", seed=63, device=DEVICE, ratio=ratio)
    assert case.req_to_token.shape[0] <= 7
    slot_ids = case.slot_ids.clone()
    slot_ids[0] = row
    length = int(case.cu_seqlens[1])
    expected = attend(case, window=None, engine="union8")
    expected[:length] = 0
    for window, group_size, engine in ways:
        out = attend(dataclasses.replace(case, slot_ids=slot_ids), window=window, group_size=group_size, engine=engine)
        assert bool((out[:length] == 0).all())
        assert same_bits(out[length:], expected[length:])


# ---------------------------------------------------------------- Many tiny groups

TINY_TOKENS = 8192
TINY_KV_HEADS = 8


def tiny_picks(tokens: int, pages: int) -> torch.Tensor:
    """0 or 1 page a query, int64 ``[kv_heads, tokens]``, groups of one of six kinds in random order.

    A group has no page at all, one that all share, one for each query, pages of one half's queries only (the other
    consumer of the stream engine has none), or one page of one query.
    """
    random = torch.Generator().manual_seed(71)
    shape = (TINY_KV_HEADS, tokens // 8)
    own = torch.randint(0, pages, (*shape, 8), generator=random)
    shared = torch.randint(0, pages, (*shape, 1), generator=random).expand(*shape, 8)
    slot = torch.arange(8)
    kinds = torch.stack(
        [
            torch.full_like(own, -1),
            shared,
            own,
            own.masked_fill(slot >= 4, -1),
            shared.masked_fill(slot < 4, -1),
            own.masked_fill(slot != torch.randint(0, 8, (*shape, 1), generator=random), -1),
        ]
    )
    kind = torch.randint(0, len(kinds), shape, generator=random)
    return kinds.gather(0, kind[None, ..., None].expand(1, *shape, 8))[0].flatten(1)


@pytest.mark.parametrize(("ratio", "group_size"), [(16, 8), (8, 16)])
@pytest.mark.parametrize("k", [1, 16])
def test_many_tiny_groups_for_every_cta(k, ratio, group_size):
    """8,192 groups of 0 to 8 pages: each CTA draws some 60, so that every ring wraps around within and between groups.

    In groups of 16 they are half as many, and what was a half's only is a quarter's. Some queries' one page lies wholly
    or partly behind them.
    """
    prefix = 32 * PAGE
    random = torch.Generator().manual_seed(72)
    picks = tiny_picks(TINY_TOKENS, (prefix + TINY_TOKENS) // PAGE)
    behind = picks > (prefix + torch.arange(TINY_TOKENS)) // PAGE
    assert 0 < int(behind.sum()) < picks.numel() // 4
    ids = torch.full((*picks.shape, k), -1)
    ids[:, :, k // 2] = picks
    keys, values = (torch.randn(prefix + TINY_TOKENS, TINY_KV_HEADS, 128, generator=random) for _ in range(2))
    no_queries = torch.zeros(1, 1, 1).expand(TINY_TOKENS, ratio * TINY_KV_HEADS, 128)
    case = one_request(no_queries, keys, values, ids, prefix)
    on_device = torch.Generator(device=DEVICE).manual_seed(73)
    q = torch.randn(case.q.shape, generator=on_device, device=DEVICE, dtype=torch.bfloat16)
    case = dataclasses.replace(case, q=q)

    expected = attend(case, window=None, engine="union8")
    blind = ((picks < 0) | behind).T.repeat_interleave(ratio, dim=1).to(DEVICE)
    assert torch.equal((expected == 0).all(dim=2), blind)
    rows = sample_rows(TINY_TOKENS, 48).to(DEVICE)
    assert nrms(expected[rows], exact_rows(case, rows)) <= FP8_NRMS
    for repeat in range(20):
        window = (None, 128, 64)[repeat % 3]
        out = attend(case, window=window, group_size=group_size, engine="stream")
        assert same_bits(out, expected), (repeat, window)


# ---------------------------------------------------------------- The largest ids and positions

LAST_PAGE = 2**24 - 1  # its last token stands at position 2^31 - 1


def largest_ids(pages: int) -> torch.Tensor:
    """The ``pages`` largest page ids."""
    return torch.arange(LAST_PAGE + 1 - pages, LAST_PAGE + 1)


def spread_ids(pages: int) -> torch.Tensor:
    """``pages`` ascending ids from 0 to the largest; some are neighbours, on both sides of 2^22 and 2^23."""
    ends = [0, 1, 2**22 - 1, 2**22, 2**23 - 1, 2**23, 2**23 + 1, LAST_PAGE - 2, LAST_PAGE - 1, LAST_PAGE]
    rest = torch.linspace(1000, LAST_PAGE - 5000, pages - len(ends)).long()
    return torch.cat([torch.tensor(ends), rest]).sort().values


@every_tile
@pytest.mark.parametrize("spread", [largest_ids, spread_ids])
@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("future", ((260, 16 * PAGE - 4), (140, 0))),  # the first sequence ends with its last page
        ("tail", ((90, 2700),)),
        ("heads4", ((70, 2900), (30, 2100))),
    ],
)
def test_page_ids_near_2_to_24(name, requests, spread, ratio, ways):
    """A plan whose pages bear other ids, in the same order, and whose limits lie in the same places of these pages.

    What a query sees stays the same, and so must every bit; only the plan holds ids and positions, so no table of 2^31
    tokens is needed.
    """
    from pageweaver_sglang.cuda import ops

    case = make_case(name, seed=81, device=DEVICE, requests=requests, kv_heads=2, ratio=ratio)
    pages = -(-int(case.seq_lens.max()) // PAGE)
    ids = spread(pages).to(DEVICE)
    assert bool((ids.diff() > 0).all())
    assert [len(ids), int(ids[-1])] == [pages, LAST_PAGE]
    expected = attend(case, window=None, engine="union8")
    assert nrms(expected, reference(case, rounded_q(case))) <= FP8_NRMS
    for window, group_size, engine in ways:
        perm = None
        if window is not None:
            picks, size = (case.topk_idx, case.cu_seqlens, case.prefix_lens), min(group_size, 8)
            perm = pw.regroup(*picks, window=window, group_size=size)
        tiles = poisoned_tiles(case.v_cache)
        plan = plan_with_slots(case, perm, window=window or 128, group_size=group_size, marks=tiles.marks)
        page, limit = plan.pages.long(), plan.limits.long()
        limit_now = ids[limit.clamp(min=0) // PAGE] * PAGE + limit.clamp(min=0) % PAGE
        renamed = dataclasses.replace(
            plan,
            pages=torch.where(page < 0, page, ids[page.clamp(min=0)]).to(torch.int32),
            limits=torch.where(limit < 0, limit, limit_now).to(torch.int32),
        )
        assert int(renamed.pages.max()) == LAST_PAGE
        assert int(renamed.limits.max()) == LAST_PAGE * PAGE + (int(case.seq_lens.max()) - 1) % PAGE
        ops.value_tiles(case.v_cache, tiles, renamed)
        out = torch.full_like(case.q, float("nan"))
        ops.union_attention(
            case.q,
            case.k_cache,
            case.v_cache,
            renamed,
            out,
            sm_scale=128**-0.5,
            engine=engine,
            tiles=tiles.tiles if engine == "stream" else None,
        )
        assert same_bits(out, expected), (window, group_size, engine)


# ---------------------------------------------------------------- Layouts of the caches


def bytes_like(cache: torch.Tensor, *shape: int) -> torch.Tensor:
    """Bytes of NaN, ``shape``, on the cache's device."""
    return torch.full(shape, NAN, dtype=torch.uint8, device=cache.device)


def heads_apart(cache: torch.Tensor) -> torch.Tensor:
    """Head after head: a token's heads lie a pool apart."""
    slots, heads, dim = cache.shape
    return bytes_like(cache, heads, slots, dim).transpose(0, 1)


def heads_apart_with_gaps(cache: torch.Tensor) -> torch.Tensor:
    """The same with 3 more slots behind every head, and 16 bytes between tokens."""
    slots, heads, dim = cache.shape
    return bytes_like(cache, heads, slots + 3, dim + 16)[:, :slots, :dim].transpose(0, 1)


def padded(cache: torch.Tensor) -> torch.Tensor:
    """64 bytes behind every head, and a head behind every token."""
    slots, heads, dim = cache.shape
    return bytes_like(cache, slots, heads + 1, dim + 64)[:, :heads, :dim]


def rows_of_both(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token's K of all heads, then its V."""
    slots, heads, dim = cache.shape
    both = bytes_like(cache, slots, 2 * heads, dim)
    return both[:, :heads], both[:, heads:]


def side_by_side(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a head side by side."""
    both = bytes_like(cache, *cache.shape[:2], 2 * cache.shape[2])
    return both[:, :, : cache.shape[2]], both[:, :, cache.shape[2] :]


LAYOUTS = {
    "heads apart": lambda cache: (heads_apart(cache), heads_apart(cache)),
    "heads apart, gaps": lambda cache: (heads_apart_with_gaps(cache), heads_apart_with_gaps(cache)),
    "rows of both": rows_of_both,
    "side by side": side_by_side,
    "K apart, V padded": lambda cache: (heads_apart(cache), padded(cache)),
    "K padded, V apart": lambda cache: (padded(cache), heads_apart(cache)),
}


@every_tile
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_heads", [3, 8])
def test_layouts_of_the_caches(kv_heads, layout, ratio, ways):
    """Through the tensor maps of either engine and the value tiles; what lies between heads and tokens is NaN."""
    case = make_case("heads4", seed=91, device=DEVICE, kv_heads=kv_heads, ratio=ratio)
    views = LAYOUTS[layout](case.k_cache)
    for view, cache in zip(views, (case.k_cache, case.v_cache), strict=True):
        view.copy_(cache.view(torch.uint8))
    k_cache, v_cache = (view.view(torch.float8_e4m3fn) for view in views)
    other = dataclasses.replace(case, k_cache=k_cache, v_cache=v_cache)
    assert not any(cache.is_contiguous() for cache in (k_cache, v_cache))
    expected = attend(case, window=None, engine="union8")
    assert nrms(expected, reference(other, rounded_q(case))) <= FP8_NRMS
    for window, group_size, engine in ways:
        assert same_bits(attend(other, window=window, group_size=group_size, engine=engine), expected)
    for engine in ("stream", "union8"):
        assert same_bits(pw.sparse_prefill(*other.args(), config=pw.Config(mode="pageweaver", engine=engine)), expected)


# ---------------------------------------------------------------- Logits


TOO_LARGE = pytest.mark.xfail(strict=True, reason="a logit's last place is 64 bits there, and P saturates or is zero")


@pytest.mark.parametrize("bits", [1.0, 1e3, 1e5, 1e6, 4e6, 1.5e7, 6e7, pytest.param(1e9, marks=TOO_LARGE)])
def test_identical_keys_at_any_logit_scale(bits):
    """Every cell holds the same key, so that a row's logits are all equal: half of ``bits`` to ``bits`` (base 2).

    The output is the mean of V. P is flat, but no power of two once the reference is rounded up by a good part of a
    bit: what the rounding to E4M3 takes from a row's P, or adds to it, the sum does not know. That is 2.7 % RMS.

    V has the mean zero: the tensor cores truncate what they add up, which takes 1.3 % from a mean of one besides.

    The exponent of P is the logit, exact, less a reference that is rounded to FP32. Up to 2^26 bits (7e7) half a place
    of it moves P by at most 2^2, which cancels; beyond, P leaves what E4M3 holds.
    """
    random = torch.Generator().manual_seed(101)
    tokens, prefix = 43, 15 * PAGE + 60
    key = torch.randn(128, generator=random).to(torch.float8_e4m3fn).float()
    q = key.sign().expand(tokens, 16, 128) * (1 - 2.0 * (torch.rand(tokens, 16, 128, generator=random) < 0.05))
    q = q * (0.6 + 0.4 * torch.rand(tokens, 16, 1, generator=random))
    q[:, 1::2] *= -1
    v = torch.randn(prefix + tokens, 1, 128, generator=random)
    ids = some_pages(tokens, 16, least=2, seed=102)
    k = key.expand(prefix + tokens, 1, 128)
    case = one_request(q, k, v, ids, prefix, bits_per_unit=bits / float(key.abs().sum()))
    out, expected = agreed_output(case), reference(case, case.q.double())
    assert nrms(out, expected) <= FP8_NRMS
    worst = (out.double() - expected).norm(dim=2) / expected.norm(dim=2)
    assert float(worst.max()) <= ONE_ROUNDING


TAILS = {
    "equal": lambda v: torch.ones_like(v),
    "opposite": lambda v: -torch.ones_like(v),
    "loud": lambda v: 32 * torch.ones_like(v),
    "random": lambda v: v,
}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("page", [0, 8, 15])
@pytest.mark.parametrize("gap", [15.9, 16.2])
def test_one_key_over_a_flat_tail_that_p_cannot_hold(gap, page, tail):
    """2,047 keys ``gap`` bits below one: together 2.7 % or 3.3 % of the row's weight.

    Beside the key's P of 2^6, theirs is 2^-10.2, which E4M3 rounds to zero, or 2^-9.9, which it rounds up to 2^-9. The
    row's sum counts them as they were before rounding. So what the key's page and those behind it lose of the tail's
    weight (or gain) is missing from the output: up to 2.9 % of the largest value, more than that of the output when the
    tail's values are larger than the key's. Pages in front of the key's were gathered with a P of 2^6 and lose nothing.
    One per cent is left for BF16 and the tensor cores' own sums.
    """
    random = torch.Generator().manual_seed(page)
    tokens, prefix, place = 9, 16 * PAGE, page * PAGE + 61
    direction = torch.randint(0, 2, (128,), generator=random).float() * 2 - 1
    k = torch.zeros(prefix + tokens, 1, 128)
    k[place] = 8 * direction
    v = TAILS[tail](torch.randn(prefix + tokens, 1, 128, generator=random))
    v[place] = 1.0
    ids = torch.arange(16).expand(1, tokens, 16)
    case = one_request(direction.expand(tokens, 16, 128), k, v, ids, prefix, bits_per_unit=gap / 1024)
    exact = 2.0 ** (6 - gap)
    rounded = float(torch.tensor(exact).to(torch.float8_e4m3fn))
    lost = (prefix - page * PAGE - 1) * abs(rounded - exact) / (2.0**6 + (prefix - 1) * exact)
    assert lost < 0.029
    error = (agreed_output(case).double() - reference(case, case.q.double()).double()).abs().max()
    assert float(error) <= (lost + 0.01) * float(v.abs().max())


# ---------------------------------------------------------------- Two streams


@pytest.mark.parametrize("tokens", [(120, 140), (1100, 900)])
def test_a_plan_attended_beside_a_call_of_another_workspace(tokens):
    """Fewer CTAs than SMs together, so that both run at once, and more. Neither draws the other's groups."""
    from pageweaver_sglang.cuda import ops

    mine, other = (
        make_case("heads4", seed=111 + i, device=DEVICE, requests=((count, 3000 + 900 * i),))
        for i, count in enumerate(tokens)
    )
    wanted = [attend(case, window=None, engine="union8") for case in (mine, other)]
    tiles = poisoned_tiles(mine.v_cache)
    plan = plan_with_slots(mine, pw.regroup(mine.topk_idx, mine.cu_seqlens, mine.prefix_lens), marks=tiles.marks)
    ops.value_tiles(mine.v_cache, tiles, plan)
    queue, plan_out = plan.queue.clone(), torch.empty_like(mine.q)
    config = pw.Config(mode="pageweaver")
    workspace = pw.Workspace(
        other.q.shape[0],
        1,
        kv_heads=4,
        topk=16,
        q_heads=64,
        window=config.window,
        pool_pages=other.k_cache.shape[0] // PAGE,
        device=DEVICE,
    )
    call_out = workspace.out(other.q.shape[0])
    different = [torch.zeros((), dtype=torch.bool, device=DEVICE) for _ in wanted]
    here, there = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(here):
            call_out.fill_(float("nan"))
            pw.sparse_prefill(*other.args(), config=config, workspace=workspace)
            different[1] |= (call_out.view(torch.int16) != wanted[1].view(torch.int16)).any()
        with torch.cuda.stream(there):
            plan_out.fill_(float("nan"))
            ops.union_attention(
                mine.q,
                mine.k_cache,
                mine.v_cache,
                plan,
                plan_out,
                sm_scale=128**-0.5,
                engine="stream",
                tiles=tiles.tiles,
            )
            different[0] |= (plan_out.view(torch.int16) != wanted[0].view(torch.int16)).any()
    torch.cuda.synchronize()
    assert not bool(torch.stack(different).any())
    assert torch.equal(plan.queue, queue)

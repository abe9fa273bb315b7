"""1,000 replays of one captured call, each with other inputs in the same buffers, against eager calls, bit for bit.

What changes: the number of requests and their lengths (padding requests without tokens behind them), prefixes, page
tables, rows of the table, top-k (holes, repeats, ids outside the request, any order) and queries. The eager call gets
tensors of the real sizes and no workspace, so that it shares neither buffers nor grid with the graph: of 8 heads it
has groups of 8, the graph groups of 16. On a BF16 cache and in groups of 16 there are 200 replays.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from gpu_support import HAS_CUDA

import pageweaver_sglang as pw
from pageweaver_sglang.bench.accuracy import nrms
from pageweaver_sglang.cuda import support

PAGE, KV_HEADS, TOPK = 128, 2, 16
TOKENS, REQUESTS, ROWS = 384, 6, 9
CONTEXT = 24 * PAGE
POOL_PAGES = REQUESTS * CONTEXT // PAGE + 5
CANARY_ROWS = 16
# By dtype of the cache; of rounds with few tokens too, where little is averaged out.
NRMS = {torch.float8_e4m3fn: 0.06, torch.bfloat16: 0.005}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]


@dataclass(frozen=True)
class Lengths:
    """Of all rounds: host lists for slicing, device tensors to copy from."""

    tokens: list[int]
    requests: list[int]
    cu_seqlens: torch.Tensor
    prefix_lens: torch.Tensor
    seq_lens: torch.Tensor


def draw_lengths(seed: int, rounds: int, device: str) -> Lengths:
    """1 to 6 requests a round, some without tokens. What a padding request's other lengths hold must not matter."""
    draw = random.Random(seed)
    tokens, requests, cu_seqlens, prefixes, sequences = [], [], [], [], []
    for _ in range(rounds):
        count = draw.randint(1, REQUESTS)
        left = draw.choice([TOKENS, TOKENS, draw.randint(0, TOKENS)])
        lengths = []
        for _ in range(count):
            lengths.append(draw.choice([0, 1, draw.randint(0, left), draw.randint(0, left)]) if left else 0)
            left -= lengths[-1]
        draw.shuffle(lengths)
        padding = [0] * (REQUESTS - count)
        prefix = [draw.choice([0, PAGE * draw.randint(0, 9), draw.randint(0, CONTEXT - TOKENS)]) for _ in lengths]
        garbage = draw.choice([0, 0, 777])
        tokens.append(sum(lengths))
        requests.append(count)
        cu_seqlens.append([sum(lengths[:i]) for i in range(count)] + [sum(lengths)] * (len(padding) + 1))
        prefixes.append(prefix + [garbage for _ in padding])
        sequences.append([p + n for p, n in zip(prefix, lengths, strict=True)] + [garbage for _ in padding])
    values = (torch.tensor(x, dtype=torch.int32, device=device) for x in (cu_seqlens, prefixes, sequences))
    return Lengths(tokens, requests, *values)


class Inputs:
    """Buffers for the largest call, filled in place on the device without waiting for it."""

    def __init__(self, device: str, cache_dtype: torch.dtype, ratio: int):
        self.random = torch.Generator(device=device).manual_seed(1)
        caches = (torch.randn(POOL_PAGES * PAGE, KV_HEADS, 128, generator=self.random, device=device) for _ in "kv")
        self.k_cache, self.v_cache = (cache.to(cache_dtype) for cache in caches)
        ints = {"dtype": torch.int32, "device": device}
        self.q = torch.zeros(TOKENS, ratio * KV_HEADS, 128, dtype=torch.bfloat16, device=device)
        self.topk_idx = torch.zeros(KV_HEADS, TOKENS, TOPK, **ints)
        self.req_to_token = torch.zeros(ROWS, CONTEXT, **ints)
        self.slot_ids = torch.zeros(REQUESTS, dtype=torch.int64, device=device)
        self.cu_seqlens = torch.zeros(REQUESTS + 1, **ints)
        self.seq_lens, self.prefix_lens = torch.zeros(REQUESTS, **ints), torch.zeros(REQUESTS, **ints)
        self.row = torch.arange(TOKENS, **ints)
        self.position = torch.arange(PAGE, device=device)

    def fill(self, lengths: Lengths, number: int) -> None:
        """Draw one round. Rows behind the last request hold ids that look valid, and queries like any others."""
        draw = {"generator": self.random, "device": self.q.device}
        self.cu_seqlens.copy_(lengths.cu_seqlens[number])
        self.prefix_lens.copy_(lengths.prefix_lens[number])
        self.seq_lens.copy_(lengths.seq_lens[number])
        self.q.normal_(generator=self.random)
        rows = torch.randperm(ROWS, **draw)
        self.slot_ids.copy_(rows[:REQUESTS])
        # Every request has pages of its own; the rows that belong to nobody keep what an earlier round wrote.
        pages = torch.randperm(POOL_PAGES, **draw)[: REQUESTS * CONTEXT // PAGE].view(REQUESTS, -1, 1)
        self.req_to_token[self.slot_ids] = (pages * PAGE + self.position).view(REQUESTS, -1).to(torch.int32)

        owner = torch.searchsorted(self.cu_seqlens[1:], self.row, right=True).clamp(max=REQUESTS - 1)
        count = ((self.seq_lens[owner] + PAGE - 1) // PAGE)[None, :, None]
        # Neighbours like the same pages, so that there is something to regroup; every id has its own deviation.
        liking = torch.rand(KV_HEADS, TOKENS // 24 + 1, TOPK, **draw)[:, self.row // 24]
        deviation = torch.rand(KV_HEADS, TOKENS, TOPK, **draw)
        ids = ((liking + 0.2 * deviation) * count).long() % count.clamp(min=1)
        kind = torch.randint(0, 20, ids.shape, **draw)
        ids = torch.where(kind == 0, -1, ids)  # a hole
        ids = torch.where(kind == 1, count + 3, ids)  # behind the sequence
        ids = torch.where(kind == 2, ids[..., :1], ids)  # a repeat
        self.topk_idx.copy_(ids)
        self.topk_idx.masked_fill_((torch.randint(0, 30, (KV_HEADS, TOKENS), **draw) == 0)[..., None], -1)

    def arguments(self, tokens: int = TOKENS, requests: int = REQUESTS) -> tuple[torch.Tensor, ...]:
        """The nine arguments: the buffers themselves, or copies of a round's real part."""
        if (tokens, requests) == (TOKENS, REQUESTS):
            part = (self.q, self.topk_idx, self.slot_ids, self.cu_seqlens, self.seq_lens, self.prefix_lens)
        else:
            of_requests = (self.slot_ids, self.seq_lens, self.prefix_lens)
            slots, sequences, prefixes = (x[:requests].clone() for x in of_requests)
            picks, bounds = self.topk_idx[:, :tokens].contiguous(), self.cu_seqlens[: requests + 1].clone()
            part = (self.q[:tokens].clone(), picks, slots, bounds, sequences, prefixes)
        q, picks, slots, bounds, sequences, prefixes = part
        return (q, self.k_cache, self.v_cache, picks, self.req_to_token, slots, bounds, sequences, prefixes)


@pytest.mark.parametrize("window", [64, 128])
@pytest.mark.parametrize("mode", ["pageweaver", "union8"])
@pytest.mark.parametrize(
    ("engine", "cache_dtype", "group_size", "replays"),
    [
        ("stream", torch.float8_e4m3fn, 8, 1000),
        ("union8", torch.float8_e4m3fn, 8, 1000),
        ("stream", torch.bfloat16, 8, 200),
        ("stream", torch.float8_e4m3fn, 16, 200),
        ("stream", torch.bfloat16, 16, 200),
    ],
    ids=["stream", "union8", "stream-bf16", "stream-16", "stream-bf16-16"],
)
def test_replays_equal_eager_calls(engine, cache_dtype, group_size, replays, mode, window):
    config = pw.Config(engine=engine, mode=mode, window=window)
    seed = 1000 * window + 10 * len(mode) + len(engine)
    lengths, inputs = draw_lengths(seed, replays, "cuda"), Inputs("cuda", cache_dtype, 16 if group_size == 8 else 8)
    assert support.call_group_size(config, inputs.q, inputs.k_cache, PAGE) == 8
    pool_pages = POOL_PAGES if support.reads_value_tiles(engine, cache_dtype) else None
    workspace = pw.Workspace(
        TOKENS,
        REQUESTS,
        kv_heads=KV_HEADS,
        topk=TOPK,
        window=window,
        group_size=group_size,
        pool_pages=pool_pages,
        device="cuda",
    )
    guarded = torch.empty(TOKENS + 2 * CANARY_ROWS, *inputs.q.shape[1:], dtype=inputs.q.dtype, device="cuda")
    out = guarded[CANARY_ROWS:-CANARY_ROWS]
    bits = guarded.view(torch.int16)

    inputs.fill(lengths, 0)
    pw.sparse_prefill(*inputs.arguments(), config=config, workspace=workspace, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pw.sparse_prefill(*inputs.arguments(), config=config, workspace=workspace, out=out)
    caches = [cache.view(torch.uint8).clone() for cache in (inputs.k_cache, inputs.v_cache)]

    # What went wrong, by round: rows that differ, padding that is not zero, rows around the output that changed,
    # inputs that changed. Read at the end, so that nothing waits.
    wrong = torch.zeros(replays, 4, dtype=torch.bool, device="cuda")
    for number in range(replays):
        inputs.fill(lengths, number)
        before = [inputs.q.clone(), inputs.topk_idx.clone(), inputs.req_to_token.clone()]
        bits.fill_(0x7FC1)  # NaN
        graph.replay()
        tokens = lengths.tokens[number]
        if tokens:
            eager = pw.sparse_prefill(*inputs.arguments(tokens, lengths.requests[number]), config=config)
            wrong[number, 0] = (out[:tokens].view(torch.int16) != eager.view(torch.int16)).any()
        wrong[number, 1] = out[tokens:].view(torch.int16).any()
        wrong[number, 2] = (bits[:CANARY_ROWS] != 0x7FC1).any() | (bits[-CANARY_ROWS:] != 0x7FC1).any()
        after = (inputs.q, inputs.topk_idx, inputs.req_to_token)
        wrong[number, 3] = torch.stack([(a != b).any() for a, b in zip(after, before, strict=True)]).any()
        if number % (replays // 4) == 0 and tokens:  # eager itself is right
            expected = pw.reference.sparse_prefill(*inputs.arguments(tokens, lengths.requests[number]))
            assert nrms(eager, expected) <= NRMS[cache_dtype]
    rounds = wrong.any(dim=1).nonzero().flatten().tolist()
    assert not rounds, f"seed {seed}: {len(rounds)} rounds, first {rounds[0]}: {wrong[rounds[0]].tolist()}"
    assert all(
        torch.equal(a, b.view(torch.uint8)) for a, b in zip(caches, (inputs.k_cache, inputs.v_cache), strict=True)
    )

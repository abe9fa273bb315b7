"""The kernels' place taken by the reference engine, so that whole benchmarks run without a GPU."""

import types
from itertools import pairwise

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang import reference
from pageweaver_sglang.bench import arms, compare, protocol, supervision

SMALL = {"cu_seqlens": [0, 90, 111], "prefix_lens": [300, 0], "seq_lens": [390, 21]}


@pytest.fixture
def small_workload():
    """111 queries of two requests, 4 ascending pages each, the own one last, -1 behind."""
    generator = torch.Generator().manual_seed(5)
    own = torch.cat([(torch.arange(90) + 300) // 128, torch.arange(21) // 128])
    liking = torch.rand(111, 4, generator=generator)
    liking[torch.arange(111), own] = 2.0
    liking[torch.arange(4) > own[:, None]] = -1.0
    best = liking.topk(3, dim=1)
    picked = best.indices.masked_fill(best.values < 0, 99).sort(dim=1).values
    picked = torch.nn.functional.pad(picked, (0, 1), value=99)
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in SMALL.items()}
    return pw.Workload(topk_idx=picked.masked_fill(picked == 99, -1).to(torch.int32)[None], page_size=128, **tensors)


def attend_plan(q, k_cache, v_cache, plan, out, req_to_token, slot_ids, cu_seqlens):
    """Attention from a plan alone (masks, pages, queries, limits), densely over each request's positions."""
    kv_heads, _, size = plan.queries.shape
    ratio = q.shape[1] // kv_heads
    position = torch.arange(req_to_token.shape[1])
    for head in range(kv_heads):
        # Row -1 takes what belongs to empty slots and to the -1 behind a union.
        picked = torch.zeros(len(q) + 1, len(position) // plan.page_size + 1, dtype=torch.bool)
        limits = torch.full((len(q) + 1,), -1)
        for slot in range(size):
            query = plan.queries[head, :, slot].long()
            group, entry = ((plan.masks[head].int() >> slot) & 1).nonzero(as_tuple=True)
            picked[query[group], plan.pages[head, group, entry].long()] = True
            limits[query] = plan.limits[head, :, slot].long()
        heads = slice(head * ratio, (head + 1) * ratio)
        for request, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            cells = req_to_token[int(slot_ids[request])].long()
            visible = picked[start:end, position // plan.page_size] & (position <= limits[start:end, None])
            score = q[start:end, heads].float() @ k_cache[cells, head].float().T * q.shape[2] ** -0.5
            weight = score.masked_fill(~visible[:, None], -torch.inf).softmax(2).nan_to_num()
            out[start:end, heads] = (weight @ v_cache[cells, head].float()).to(out.dtype)


class Reporter:
    """What a measuring process tells, to a list."""

    def __init__(self, on_done):
        self.arms, self.done = [], on_done

    def begins(self, arm):
        self.arms.append(arm)


def in_this_process(work, workloads, *, patience, on_done, on_loss):
    work(workloads, {}, Reporter(on_done))


@pytest.fixture
def reference_kernels(monkeypatch):
    """PageWeaver's kernels by the reference engine, CUDA events by the host's clock, graphs by calls."""
    from pageweaver_sglang.cuda import ops

    where = {}

    def regroup(topk_idx, cu_seqlens, prefix_lens, perm, **options):
        perm.copy_(reference.regroup(topk_idx, cu_seqlens, prefix_lens, **options))

    def prepare_unions(topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, plan, *, window, **pool):
        made = reference.prepare_unions(
            topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, window=window, group_size=plan.group_size
        )
        for name in ("pages", "masks", "counts", "queries", "limits"):
            getattr(plan, name).copy_(getattr(made, name))
        if pool["marks"] is not None:
            pool["marks"].fill_(plan.page_size)
        where.update(req_to_token=pool["req_to_token"], slot_ids=pool["slot_ids"], cu_seqlens=cu_seqlens)

    def value_tiles(v_cache, tiles, plan):
        """As the kernel, without the transposition."""
        pages = v_cache.view(torch.uint8).view(-1, 128, *v_cache.shape[1:]).permute(2, 0, 1, 3).flatten(2)
        marked = tiles.marks > 0
        tiles.tiles[marked] = pages[marked]
        tiles.marks.zero_()

    def union_attention(q, k_cache, v_cache, plan, out, *, engine=None, tiles=None, **scales):
        assert (tiles is None) == ((engine or ops.default_engine(plan.group_size)) == "union8")
        if tiles is not None:  # V from nowhere else
            pages = tiles.unflatten(2, (plan.page_size, -1)).permute(1, 2, 0, 3)
            v_cache = pages.reshape(v_cache.shape).view(v_cache.dtype)
        attend_plan(q, k_cache, v_cache, plan, out, **where)

    for function in (regroup, prepare_unions, value_tiles, union_attention):
        monkeypatch.setattr(ops, function.__name__, function)
    monkeypatch.setattr(compare, "DEVICE", "cpu")
    monkeypatch.setattr(compare, "unusable_gpu", lambda: None)
    monkeypatch.setattr(arms, "build_kernels", lambda: 0.5)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    properties = types.SimpleNamespace(L2_cache_size=100_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(protocol, "CudaClock", protocol.HostClock)
    monkeypatch.setattr(supervision, "supervise", in_this_process)
    monkeypatch.setattr(
        protocol, "capture", lambda arm, sets: [lambda index=index: arm.call(index) for index in range(sets)]
    )

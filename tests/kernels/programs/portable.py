"""The portable engine's kernel in Triton's interpreter against the reference engine; run with TRITON_INTERPRET=1.

Prints a line per case and exits with 1 if one is wrong.
"""

import dataclasses
import sys

import torch

from pageweaver_sglang import reference
from pageweaver_sglang.bench.accuracy import nrms
from pageweaver_sglang.cuda import portable, support
from pageweaver_sglang.plan import UnionPlan
from tests.generators import Case, make_case, unmap_pages
from tests.kernels.portable_limits import MOST_NRMS
from tests.sglang.triton_cpu import repair_bfloat16

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
AMPERE, ADA, HOPPER = (8, 0), (8, 9), (9, 0)
SMALL = {"k": 4}

# Name of a case of tests/generators.py, what is changed, the GPU to work as.
RECIPES = [
    ("tail", {"requests": ((13, 480),), "tail": 1}, HOPPER),
    ("tail", {"requests": ((11, 300),), "tail": 63, "page_size": 64, "cache_dtype": BF16}, HOPPER),
    ("packed", {"requests": ((9, 0), (0, 40), (5, 300)), "kv_heads": 2, "padding": 3, "ratio": 8}, AMPERE),
    ("packed", {"requests": ((1, 0), (20, 70)), "kv_heads": 8, "ratio": 1, "page_size": 64}, ADA),
    ("holes", {"requests": ((40, 250),), "ratio": 4, "cache_dtype": BF16}, AMPERE),
    ("duplicates", {"requests": ((12, 250),), "ratio": 6, "page_size": 64}, HOPPER),
    ("all_invalid", {"requests": ((9, 250),), "padding": 2}, HOPPER),
    ("out_of_range", {"requests": ((12, 250),), "ratio": 2, "head_dim": 64}, AMPERE),
    ("future", {"requests": ((20, 300), (6, 0)), "ratio": 5, "page_size": 64, "cache_dtype": BF16}, HOPPER),
    ("cut_short", {"requests": ((50, 300), (20, 0)), "ratio": 4, "cut": 30}, ADA),
    ("scaled", {"requests": ((10, 250),)}, AMPERE),
    ("strided", {"requests": ((5, 300),), "kv_heads": 3}, HOPPER),
    ("few_picks", {"requests": ((10, 500),), "k": 3, "head_dim": 64, "cache_dtype": BF16}, HOPPER),
]


def plan_of(case: Case, ratio: int, *, regrouped: bool) -> UnionPlan:
    """The plan by the reference engine, with the physical pages that it leaves out."""
    lengths = (case.cu_seqlens, case.seq_lens, case.prefix_lens)
    (group_size,) = support.union_group_sizes("portable", ratio)
    sizes = {"window": 64, "group_size": group_size, "page_size": case.page_size}
    perm = reference.regroup(case.topk_idx, case.cu_seqlens, case.prefix_lens, **sizes) if regrouped else None
    plan = reference.prepare_unions(case.topk_idx, perm, *lengths, **sizes)
    return dataclasses.replace(plan, slots=slots_of(plan, case.cu_seqlens, case.req_to_token, case.slot_ids))


def slots_of(
    plan: UnionPlan, cu_seqlens: torch.Tensor, req_to_token: torch.Tensor, slot_ids: torch.Tensor
) -> torch.Tensor:
    """The physical page of every page that a plan lists, -1 elsewhere: int32, shape of ``plan.pages``."""
    slots = torch.full_like(plan.pages, -1)
    bounds = cu_seqlens.tolist()
    for head, group, entry in (plan.pages >= 0).nonzero().tolist():
        first = int(plan.queries[head, group].max())  # groups never cross requests
        request = next(r for r, end in enumerate(bounds[1:]) if first < end)
        row = req_to_token[slot_ids[request].long()]
        slots[head, group, entry] = row[int(plan.pages[head, group, entry]) * plan.page_size] // plan.page_size
    return slots


def behind_the_end(case: Case) -> Case:
    """The same with NaN in every cell that no token of a request owns."""
    owned = torch.zeros(case.k_cache.shape[0], dtype=torch.bool)
    for row, length in zip(case.slot_ids.tolist(), case.seq_lens.tolist(), strict=True):
        owned[case.req_to_token[row, :length].long()] = True
    caches = [cache.float() for cache in (case.k_cache, case.v_cache)]
    for cache in caches:
        cache[~owned] = float("nan")
    k_cache, v_cache = (cache.to(case.k_cache.dtype) for cache in caches)
    return dataclasses.replace(case, k_cache=k_cache, v_cache=v_cache)


def attend(case: Case, capability: tuple[int, int], *, regrouped: bool) -> torch.Tensor:
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype)
    portable.union_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        plan_of(case, case.q.shape[1] // case.k_cache.shape[1], regrouped=regrouped),
        out,
        sm_scale=case.q.shape[2] ** -0.5,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        capability=capability,
    )
    return out


def compare(name: str, case: Case, capability: tuple[int, int], *, regrouped: bool) -> bool:
    """Whether a case comes out right; prints what was found."""
    out = attend(case, capability, regrouped=regrouped)
    exact = reference.sparse_prefill(case.q.double(), *case.args()[1:], **case.keywords())
    empty = (exact == 0).all(dim=(1, 2))
    error = nrms(out, exact)
    right = error <= MOST_NRMS[case.k_cache.dtype] and bool((out[empty] == 0).all())
    print(f"{'right' if right else 'WRONG'} {name}: NRMS {error:.3%}, {int(empty.sum())} empty rows")
    return right


def every_e4m3_number() -> bool:
    """Both ways to FP16, for all 256 bytes: the output of a query that sees one token is that token's value.

    NaN is looked at where bits are moved; the interpreter's own conversion makes 480 of it.
    """
    numbers = torch.arange(256, dtype=torch.uint8).view(2, 128).view(FP8)
    right = True
    for half in numbers:
        case = make_case("single", k=1)
        v_cache = case.v_cache.clone()
        v_cache[case.req_to_token[case.slot_ids[0], 0].long()] = half
        case = dataclasses.replace(case, v_cache=v_cache)
        for capability in (AMPERE, HOPPER):
            out = attend(case, capability, regrouped=False).float()
            wanted = half.float().expand(1, 16, 128)
            if capability == HOPPER:
                out = out.where(wanted.isfinite(), wanted)
            right &= torch.equal(out.nan_to_num(999), wanted.nan_to_num(999))
    print(f"{'right' if right else 'WRONG'} every E4M3 number")
    return right


def extremes() -> bool:
    """Huge and zero queries with the largest keys: finite, and huge scores keep their winner."""
    case = make_case("few_picks", k=3, requests=((6, 300),))
    k_cache = torch.full_like(case.k_cache.float(), 448.0).to(FP8)
    right = True
    for value in (3e38, -3e38, 1e-38, 0.0):
        q = torch.full_like(case.q, value)
        out = attend(dataclasses.replace(case, q=q, k_cache=k_cache), HOPPER, regrouped=True)
        right &= bool(out.isfinite().all())
    sharp = dataclasses.replace(case, q=case.q * 1e36)
    exact = reference.sparse_prefill(sharp.q.double(), *sharp.args()[1:])
    right &= nrms(attend(sharp, HOPPER, regrouped=True), exact) <= MOST_NRMS[FP8]
    print(f"{'right' if right else 'WRONG'} extremes")
    return right


def unmapped_pages() -> bool:
    """Pages that the table has no place for add nothing, and what lies in the pool's first page doesn't matter."""
    right = True
    for dtype, regrouped in ((FP8, False), (BF16, True)):
        mapped = make_case("packed", seed=3, k=4, requests=((40, 600), (12, 250)), kv_heads=2, cache_dtype=dtype)
        case, sound = unmap_pages(mapped)
        out = attend(case, HOPPER, regrouped=regrouped)
        exact = reference.sparse_prefill(sound.q.double(), *sound.args()[1:])
        right &= nrms(out, exact) <= MOST_NRMS[dtype]
        right &= bool((out[(exact == 0).all(dim=(1, 2))] == 0).all())
    print(f"{'right' if right else 'WRONG'} unmapped pages")
    return right


def main() -> None:
    repair_bfloat16()
    right = [every_e4m3_number(), extremes(), unmapped_pages()]
    for seed, (name, changes, capability) in enumerate(RECIPES):
        case = make_case(name, seed=seed, **{**SMALL, **changes})
        text = f"{name} {changes} {capability}"
        right.append(compare(text, behind_the_end(case), capability, regrouped=seed % 2 == 0))
    sys.exit(not all(right))


if __name__ == "__main__":
    main()

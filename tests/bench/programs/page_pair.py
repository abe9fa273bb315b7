"""The page-pair kernels in Triton's interpreter against the reference engine; run with TRITON_INTERPRET=1."""

import sys

import torch

from pageweaver_sglang import reference
from pageweaver_sglang.bench.peers.page_pair.kernels import page_pair_attention
from pageweaver_sglang.bench.peers.page_pair.pairing import pair_pages
from tests.generators import make_case

# The interpreter multiplies the bits of bf16: everything here is float32 instead.
SIZES = {"k": 4, "cache_dtype": torch.float8_e4m3fn}
RECIPES = {
    "tail": {"requests": ((21, 480),), "ratio": 8},
    "packed": {"requests": ((9, 0), (0, 40), (13, 300)), "kv_heads": 2, "padding": 3},
    "holes": {"requests": ((40, 500),), "ratio": 2},
    "future": {"requests": ((20, 300),)},
}


def main() -> None:
    worst = 0.0
    for name, changes in RECIPES.items():
        case = make_case(name, seed=3, **{**SIZES, **changes})
        q = case.q.float()
        plan = pair_pages(case.topk_idx, case.cu_seqlens, case.seq_lens, case.prefix_lens, page_size=case.page_size)
        shape = (*plan.counts.shape, max(plan.max_partials, 1), q.shape[1] // plan.counts.shape[0])
        part, log_sum = torch.full((*shape, q.shape[2]), float("nan")), torch.full(shape, float("nan"))
        out = torch.full(q.shape, float("nan"))
        page_pair_attention(
            q, case.k_cache, case.v_cache, case.req_to_token, case.slot_ids, plan, part, log_sum, out, page_size=128
        )
        arguments = (q.double(), *case.args()[1:])
        exact = reference.sparse_prefill(*arguments, page_size=case.page_size)
        error = float((out - exact).norm() / exact.norm())
        print(f"{name}: {plan.pairs} pairs, {plan.common} common, {plan.exclusive} exclusive, NRMS {error:.1e}")
        worst = max(worst, error if error == error else float("inf"))
    sys.exit(worst > 1e-6)


if __name__ == "__main__":
    main()

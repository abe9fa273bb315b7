"""Random calls of the portable engine's kernel in Triton's interpreter; run with TRITON_INTERPRET=1.

Prints the seed of every wrong call, and how many were made; exits with 1 if one is wrong.
"""

import sys
import types

import torch

from pageweaver_sglang.cuda import portable
from pageweaver_sglang.fuzz.build import Pools, build
from pageweaver_sglang.fuzz.dense import expected
from pageweaver_sglang.fuzz.draw import draw_call
from pageweaver_sglang.fuzz.trial import describe_rows, judge
from pageweaver_sglang.fuzz.variants import VARIANTS
from tests.kernels.programs.portable import AMPERE, plan_of
from tests.sglang.triton_cpu import repair_bfloat16


def main(first: int, count: int) -> None:
    torch.set_num_threads(1)
    repair_bfloat16()
    pools, arithmetic = Pools("cpu"), VARIANTS["portable"].arithmetic
    made, wrong_seeds, seed = 0, [], first
    while made < count:
        call = draw_call(seed, ("portable",), 20)
        seed += 1
        if not 1 <= call.tokens <= 16:
            continue
        tensors = build(call, pools)
        case = types.SimpleNamespace(**tensors.arguments, page_size=call.page_size)
        out = torch.full_like(case.q, float("nan"))
        portable.union_attention(
            case.q,
            case.k_cache,
            case.v_cache,
            plan_of(case, call.shape.ratio, regrouped=call.config["mode"] == "pageweaver"),
            out,
            sm_scale=call.shape.head_dim**-0.5 if call.sm_scale is None else call.sm_scale,
            k_scale=tensors.scales["k_scale"],
            v_scale=tensors.scales["v_scale"],
            capability=AMPERE,
        )
        wanted = expected(call, tensors, arithmetic)
        made += 1
        if int(judge(out, wanted)[0]):
            wrong_seeds.append(call.seed)
            print(f"seed {call.seed}: {describe_rows(out, wanted)}")
    print(f"{made} calls, wrong: {wrong_seeds}")
    sys.exit(bool(wrong_seeds))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

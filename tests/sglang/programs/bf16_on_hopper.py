"""A BF16 KV cache where the GPU passes for a Hopper: everything that the plugin does before attention, inside SGLang.

The portable engine's kernel is interpreted. What CUDA kernels do there is done in PyTorch here: regrouping and unions
by the reference engine, and the engine ``stream`` by float64 attention over the plan.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from serving_process import start  # isort: skip
import torch

sys.path.append(str(Path(__file__).resolve().parents[3]))  # behind everything that is installed
from tests.kernels.programs.portable import slots_of

server_args = start()

from sparse_case import Case  # noqa: E402

from pageweaver_sglang import api, reference  # noqa: E402
from pageweaver_sglang.config import Config, load_config  # noqa: E402
from pageweaver_sglang.cuda import ops, support  # noqa: E402
from pageweaver_sglang.plugin import kernels, step3, tiles  # noqa: E402

report: dict = {}
attended: list = []


def regroup(topk_idx, cu_seqlens, prefix_lens, perm, **options):
    perm.copy_(reference.regroup(topk_idx, cu_seqlens, prefix_lens, **options))


def prepare_unions(
    topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, plan, *, window, req_to_token, slot_ids, **options
):
    sizes = {"window": window, "group_size": plan.group_size, "page_size": plan.page_size}
    own = reference.prepare_unions(topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, **sizes)
    for name in ("pages", "masks", "counts", "queries", "limits"):
        getattr(plan, name).copy_(getattr(own, name))
    plan.slots.copy_(slots_of(plan, cu_seqlens, req_to_token, slot_ids))


def union_attention(*arguments, engine, tiles, **options):
    attended.append([engine, arguments[3].group_size, tiles is not None])
    if engine == "stream":
        attend_over_plan(*arguments, sm_scale=options["sm_scale"])
    else:
        real_union_attention(*arguments, engine=engine, tiles=tiles, **options)


def attend_over_plan(q, k_cache, v_cache, plan, out, *, sm_scale):
    """Every query over the tokens it sees of its own pages, in float64; K and V without scales."""
    ratio, size = q.shape[1] // k_cache.shape[1], plan.page_size
    for head, group, slot in (plan.queries >= 0).nonzero().tolist():
        query, limit = int(plan.queries[head, group, slot]), int(plan.limits[head, group, slot])
        heads = slice(head * ratio, (head + 1) * ratio)
        own = ((plan.masks[head, group] >> slot) & 1).nonzero().flatten()
        tokens = (plan.pages[head, group, own, None] * size + torch.arange(size)).flatten()
        cells = (plan.slots[head, group, own, None] * size + torch.arange(size)).flatten()[tokens <= limit]
        weights = (q[query, heads].double() @ k_cache[cells, head].double().T * sm_scale).softmax(dim=1)
        out[query, heads] = (weights @ v_cache[cells, head].double()).to(out.dtype)


def unsupported_reason(*arguments, **options):
    """As on a GPU, but for the last question, which is whether it is one."""
    reason = real_unsupported_reason(*arguments, **options)
    return None if reason == "q must be on a CUDA device, got cpu" else reason


def uncovered(self, call):
    tensors = (call[name] for name in ("q", "k_cache", "v_cache", "topk_idx"))
    return support.unsupported_reason(*tensors, page_size=call["block_size_k"], engine=self.config.engine)


def needed(config, v_cache):
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda", dtype=v_cache.dtype, shape=v_cache.shape)
    return real_needed(config, on_gpu)


real_union_attention, real_unsupported_reason = ops.union_attention, support.unsupported_reason
real_settings_on, real_needed = kernels.settings_on, tiles._needed
ops.regroup, ops.prepare_unions, ops.union_attention = regroup, prepare_unions, union_attention
support.unsupported_reason, step3.Step3._uncovered = unsupported_reason, uncovered
kernels.settings_on = lambda config, device, *kind: real_settings_on(config, torch.device("cuda"), *kind)
tiles._needed = needed
api._on_cuda = lambda tensor: True
torch.cuda.get_device_capability = lambda device: (9, 0)
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.current_stream = lambda device: None

for name, settings, dtype in (
    ("stream", {}, torch.bfloat16),
    ("stream high", {"precision": "high"}, torch.bfloat16),
    ("portable", {"engine": "portable"}, torch.bfloat16),
    ("portable high", {"engine": "portable", "precision": "high"}, torch.bfloat16),
    ("union8", {"engine": "union8"}, torch.bfloat16),
    ("fp8", {}, torch.float8_e4m3fn),
):
    variables = {f"PAGEWEAVER_{setting.upper()}": value for setting, value in settings.items()}
    os.environ.update(variables)
    asked = load_config()
    case = Case(server_args, [300, 0], [5, 4], dtype=dtype)
    for variable in variables:
        del os.environ[variable]
    started_with = case.backend.sparse.step3.config
    report[name] = {"engine": started_with.engine, "precision": started_with.precision}
    if dtype == torch.bfloat16:
        attended.clear()
        ours, _ = case.prefill(started_with)
        again, _ = case.prefill(asked)  # as if nobody had looked at the pool
        report[name] |= {"attended": list(attended), "same": torch.equal(ours, again), **case.stats()}
        theirs, _ = case.prefill(Config(mode="native"))
        report[name]["nrms"] = step3.compare(ours, theirs).nrms
    report[name]["pools with value tiles"] = len(tiles._of_pools)

with open(os.environ["REPORT"], "w") as file:
    json.dump(report, file)

"""The arguments of SGLang's Step 3, by the names that ``sparse_prefill`` has for them."""

from __future__ import annotations

from typing import Any

import torch


def sparse_prefill_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments of :func:`pageweaver_sglang.sparse_prefill`, and of XQA's function of that name, for a call of Step 3.

    SGLang's backend passes lengths as int32; anything else is converted on the device, without a synchronisation.

    Args:
        call: arguments of SGLang's function, by name.
    """
    same = ("q", "k_cache", "v_cache", "topk_idx", "req_to_token", "slot_ids")
    lengths = ("cu_seqlens", "seq_lens", "prefix_lens")
    scales = ("sm_scale", "k_scale", "v_scale")
    return {
        **{name: call[name] for name in same},
        **{name: call[name].to(torch.int32) for name in lengths},
        **{name: call.get(name) for name in scales},
        "page_size": call["block_size_k"],
    }

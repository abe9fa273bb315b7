"""The public functions: argument checks, then the reference engine for CPU tensors or the kernels for CUDA ones."""

from __future__ import annotations

import torch

from . import checks, reference
from .auto.history import Decision, can_pay
from .config import Config
from .cuda import support
from .plan import UnionPlan
from .value_tiles import ValueTiles
from .workspace import Workspace


def regroup(
    topk_idx: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    window: int = 128,
    group_size: int = 8,
    page_size: int = 128,
    capacity: int | None = None,
    guard: str = "none",
    visits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Permute the queries of every window so that queries of one group picked similar pages.

    Per request, KV head and window, greedily: the first member of a group is the smallest query id left; then the
    query that adds the fewest pages to the group's union joins (the smaller id on a tie) until the group is full.

    Args:
        topk_idx: int32 ``[kv_heads, tokens, k]``, logical pages picked, in any order. Negative ids and ids past the
            request's last page pick nothing; repeated ids count once. CUDA: k <= 16.
        cu_seqlens: int32 ``[requests + 1]``, first token of each request in the packed tokens.
        prefix_lens: int32 ``[requests]``, tokens of each request before this chunk; its sequence length is this and
            the chunk's length.
        window: queries of one request that are candidates for each other. CUDA: 64 or 128.
        group_size: queries per group, 1 to 32.
        page_size: tokens per page.
        capacity: a request of more logical pages than this keeps its original order; None for no limit.
        guard: ``"window"`` keeps a window's original order unless regrouping lowers its page visits; ``"none"``.
        visits: int64 ``[2]``, contiguous: the page visits of the original order and those of the returned one, all
            windows and KV heads together, are added. Padding rows, and requests past ``capacity``, add nothing.

    Returns:
        int32 ``[kv_heads, tokens]``, contiguous: for every request a permutation of its token ids, window by window.
        Padding rows behind the last request keep their own id.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has a wrong shape, device or value. Contents are only checked for CPU tensors.
    """
    if not _on_cuda(topk_idx):
        return reference.regroup(
            topk_idx,
            cu_seqlens,
            prefix_lens,
            window=window,
            group_size=group_size,
            page_size=page_size,
            capacity=capacity,
            guard=guard,
            visits=visits,
        )
    checks.check_regroup(
        topk_idx,
        cu_seqlens,
        prefix_lens,
        window=window,
        group_size=group_size,
        page_size=page_size,
        capacity=capacity,
        guard=guard,
        visits=visits,
    )
    checks.check_regroup_kernel(topk_idx, window=window)
    from .cuda import ops

    perm = torch.empty(topk_idx.shape[:2], dtype=torch.int32, device=topk_idx.device)
    if perm.numel():
        ops.regroup(
            topk_idx,
            cu_seqlens,
            prefix_lens,
            perm,
            window=window,
            group_size=group_size,
            page_size=page_size,
            capacity=capacity,
            guard=guard,
            visits=visits,
        )
    return perm


def prepare_unions(
    topk_idx: torch.Tensor,
    perm: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    window: int = 128,
    group_size: int = 8,
    page_size: int = 128,
) -> UnionPlan:
    """List every group's pages once, with one bit per query that picked the page.

    Args:
        topk_idx: int32 ``[kv_heads, tokens, k]``, as in :func:`regroup`.
        perm: int32 ``[kv_heads, tokens]``, contiguous, the order of :func:`regroup` or another that permutes the ids
            within each request; None for the original order.
        cu_seqlens: int32 ``[requests + 1]``.
        seq_lens: int32 ``[requests]``, sequence length of each request.
        prefix_lens: int32 ``[requests]``.
        window: groups end at multiples of this many queries of a request.
        group_size: queries per group, 1 to 32. CUDA: 1 to 16.
        page_size: tokens per page.

    Returns:
        The plan; its ``slots`` is None.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has a wrong shape, device or value. Contents are only checked for CPU tensors.
    """
    if not _on_cuda(topk_idx):
        return reference.prepare_unions(
            topk_idx,
            perm,
            cu_seqlens,
            seq_lens,
            prefix_lens,
            window=window,
            group_size=group_size,
            page_size=page_size,
        )
    checks.check_unions(
        topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, window=window, group_size=group_size, page_size=page_size
    )
    checks.check_unions_kernel(topk_idx, group_size=group_size)
    from .cuda import ops

    kv_heads, tokens, k = topk_idx.shape
    plan = UnionPlan.empty(
        kv_heads,
        tokens,
        cu_seqlens.shape[0] - 1,
        k,
        window=window,
        group_size=group_size,
        page_size=page_size,
        device=topk_idx.device,
    )
    if plan.counts.numel():
        ops.prepare_unions(topk_idx, perm, cu_seqlens, seq_lens, prefix_lens, plan, window=window)
    return plan


def sparse_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    req_to_token: torch.Tensor,
    slot_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    sm_scale: float | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    page_size: int = 128,
    config: Config | None = None,
    workspace: Workspace | None = None,
    value_tiles: ValueTiles | None = None,
    decision: Decision | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend every query to the visible tokens of the pages it picked (Step 3 of MiniMax-M3's sparse prefill).

    Query ``i`` of a request stands at position ``prefix_len + i`` and sees token ``t`` when it picked page
    ``t // page_size``, ``t < seq_len`` and ``t <= position``. A query that sees nothing, and every padding row behind
    the last request, gets zeros.

    CPU tensors run the reference engine in float64. CUDA tensors run the kernels; with a ``workspace`` (that has an
    output buffer, or with ``out``, and for FP8 caches ``pool_pages``) they neither allocate nor synchronise, so that a
    CUDA Graph can capture the call and replay it with other lengths in the same buffers.

    Args:
        q: ``[tokens, q_heads, head_dim]``, bfloat16 on CUDA; heads ``g * h .. g * h + g - 1`` read KV head ``h``,
            ``g = q_heads / kv_heads``.
        k_cache: ``[slots, kv_heads, head_dim]``, float8_e4m3fn or bfloat16 on CUDA, bfloat16 not with the engine
            ``union8`` on Hopper (on the CPU float16 and float32 too).
        v_cache: shape and dtype of ``k_cache``.
        topk_idx: int32 ``[kv_heads, tokens, k]``, as in :func:`regroup`.
        req_to_token: int32 ``[request slots, positions]``, cache slot of each token. The kernels take a page's first
            entry and expect its tokens to follow it in the cache, as they do in a pool of pages of ``page_size``.
        slot_ids: int32 or int64 ``[requests]``, row of ``req_to_token`` of each request.
        cu_seqlens: int32 ``[requests + 1]``.
        seq_lens: int32 ``[requests]``.
        prefix_lens: int32 ``[requests]``.
        sm_scale: scale of the scores; None for ``head_dim ** -0.5``.
        k_scale: what a stored key is multiplied by: None (1), a float or a float32 tensor of one element.
        v_scale: the same for values.
        page_size: tokens per page. CUDA: 128 or 64, on Hopper only 128 with the engine ``union8``.
        config: settings; None for the defaults. ``mode`` must not be ``native``.
        workspace: buffers to use instead of allocating. Its ``group_size`` is the call's: one that the engine takes.
            Hopper's own engines take 8, ``stream`` with up to 8 query heads per KV head also 16;
            :func:`.cuda.support.call_group_size` says which is the better one for a call, and without a workspace
            serves.
        value_tiles: where the stream engine keeps V's tiles, instead of the workspace's or of memory allocated for the
            call; not used with a bfloat16 cache. Of the pool's size; the call before that used it must be ahead in the
            same stream.
        decision: in mode ``auto``, what a :class:`pageweaver_sglang.History` decided for this very call. Without one
            the call regroups unless it is so small that regrouping cannot pay.
        out: ``[tokens, q_heads, head_dim]`` of q's dtype, contiguous: where to write the result.

    Returns:
        ``out``, or else the workspace's output buffer, or else a new tensor: ``[tokens, q_heads, head_dim]``.

    Raises:
        UnsupportedError: the arguments are valid, but the kernels do not cover them (CUDA).
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has a wrong shape, device or value. Contents are only checked for CPU tensors.
        torch.OutOfMemoryError: memory to be allocated is not to be had.
    """
    arguments = (q, k_cache, v_cache, topk_idx, req_to_token, slot_ids, cu_seqlens, seq_lens, prefix_lens)
    checks.check_sparse_prefill(
        *arguments,
        sm_scale=sm_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        page_size=page_size,
        config=config,
        workspace=workspace,
        value_tiles=value_tiles,
        decision=decision,
        out=out,
    )
    tokens, _, head_dim = q.shape
    measurement = None if decision is None else decision.measurement
    if out is None and workspace is not None and workspace.q_heads is not None:
        out = workspace.out(tokens)
    if not _on_cuda(q):
        if measurement is not None:
            # The reference engine has no use for an order: this counts as the regroup kernel does.
            config = config or Config()
            reference.regroup(
                topk_idx,
                cu_seqlens,
                prefix_lens,
                window=config.window,
                group_size=support.call_grouping(config, q, k_cache, page_size).order,
                page_size=page_size,
                capacity=config.regroup_capacity,
                guard=config.guard,
                visits=measurement.visits,
            )
            measurement.send()
        return reference.sparse_prefill(
            *arguments, sm_scale=sm_scale, k_scale=k_scale, v_scale=v_scale, page_size=page_size, out=out
        )

    from .cuda import ops

    checks.check_sparse_prefill_kernel(req_to_token, slot_ids, out)
    config = config or Config()
    reason = support.unsupported_reason(
        q,
        k_cache,
        v_cache,
        topk_idx,
        page_size=page_size,
        engine=config.engine,
        sm_scale=sm_scale,
        k_scale=k_scale,
    )
    if reason is not None:
        raise checks.UnsupportedError(f"sparse_prefill: {reason}")
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    kind = support.call_kind(q, k_cache, page_size)
    engine = support.engine_on(config.engine, support.capability_of(q.device), kind)
    requests = cu_seqlens.shape[0] - 1
    kv_heads, _, k = topk_idx.shape
    processors = support.processors_of(q.device)
    grouping = support.grouping(engine, q.shape[1] // kv_heads, kv_heads * tokens, processors)
    pool_pages = k_cache.shape[0] // page_size
    if not support.reads_value_tiles(engine, v_cache.dtype):
        value_tiles = None
    elif value_tiles is None and workspace is not None:
        value_tiles = workspace.value_tiles(pool_pages)
    elif value_tiles is None:
        value_tiles = ValueTiles.empty(kv_heads, pool_pages, device=q.device)
    if workspace is not None:
        plan = workspace.plan(tokens, requests, page_size=page_size)
    else:
        plan = UnionPlan.empty(
            kv_heads,
            tokens,
            requests,
            k,
            window=config.window,
            group_size=grouping.union,
            page_size=page_size,
            device=q.device,
            with_slots=True,
        )
    marks = None if value_tiles is None else value_tiles.begin()
    perm = None
    if measurement is not None and torch.cuda.is_current_stream_capturing():
        measurement = None  # every replay would count again
    if _regroups(config, engine, decision, kv_heads * tokens, k, plan.group_size):
        perm = (
            workspace.perm(tokens)
            if workspace is not None
            else torch.empty((kv_heads, tokens), dtype=torch.int32, device=q.device)
        )
        ops.regroup(
            topk_idx,
            cu_seqlens,
            prefix_lens,
            perm,
            window=config.window,
            group_size=grouping.order,
            page_size=page_size,
            capacity=config.regroup_capacity,
            guard=config.guard,
            visits=None if measurement is None else measurement.visits,
        )
    ops.prepare_unions(
        topk_idx,
        perm,
        cu_seqlens,
        seq_lens,
        prefix_lens,
        plan,
        req_to_token=req_to_token,
        slot_ids=slot_ids,
        num_pool_pages=pool_pages,
        window=config.window,
        marks=marks,
        behind_regroup=perm is not None,
    )
    if value_tiles is not None:
        ops.value_tiles(v_cache, value_tiles, plan)
        value_tiles.end()
    ops.union_attention(
        q,
        k_cache,
        v_cache,
        plan,
        out,
        sm_scale=head_dim**-0.5 if sm_scale is None else float(sm_scale),
        k_scale=_on_host(k_scale),
        v_scale=_on_host(v_scale),
        engine=engine,
        precision=config.precision,
        tiles=None if value_tiles is None else value_tiles.tiles,
    )
    if measurement is not None:
        measurement.send()
    return out


def _regroups(config: Config, engine: str, decision: Decision | None, rows: int, topk: int, union: int) -> bool:
    """Whether a call of ``rows`` (query, KV head) pairs regroups that ``engine`` serves in groups of ``union``."""
    if config.mode != "auto":
        return config.mode == "pageweaver"
    if decision is not None:
        return decision.regroup
    return can_pay(rows, topk, window=config.window, engine=engine, union=union)


def _on_cuda(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_cuda


def _on_host(scale: float | torch.Tensor | None) -> float | torch.Tensor | None:
    """Turn a scale that lies in host memory into a float; a CUDA tensor stays where it is, for the kernel to read."""
    if isinstance(scale, torch.Tensor) and not scale.is_cuda:
        return float(scale)
    return scale

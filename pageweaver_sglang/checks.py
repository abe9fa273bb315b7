"""Checks of the public functions' arguments, in one place and with messages of one form.

A message reads ``regroup: topk_idx must be int32 [kv_heads, tokens, k], got float32 [3, 4]``. A wrong type or dtype is
a ``TypeError``, a wrong shape, device or value a ``ValueError``. Shapes, dtypes and devices are always checked;
contents only for CPU tensors, because reading a CUDA tensor would synchronise and break CUDA Graph capture.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .config import Config
from .cuda import support

if TYPE_CHECKING:
    from .workspace import Workspace

GUARDS = ("none", "window")
MAX_GROUP_SIZE = 32
MAX_INT32 = 2**31 - 1
Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CACHE_DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32)
_INT32 = (torch.int32,)

# A dimension: its name, and its size where another argument fixes it.
Dim = tuple[str, "int | None"]


class UnsupportedError(ValueError):
    """The arguments are valid, but the CUDA kernels do not cover them."""


def describe(value: Any) -> str:
    """Return what an error message says of an argument: dtype and shape of a tensor, type and value of the rest."""
    if isinstance(value, torch.Tensor):
        return f"{_name(value.dtype)} {list(value.shape)}"
    return f"{type(value).__name__} {value!r}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fail(kind: type[Exception], function: str, name: str, expected: str, got: str) -> NoReturn:
    raise kind(f"{function}: {name} must be {expected}, got {got}")


def _tensor(
    function: str,
    name: str,
    value: Any,
    dtypes: tuple[torch.dtype, ...],
    dims: tuple[Dim, ...],
    device: torch.device | None = None,
) -> torch.Tensor:
    """Check one tensor argument; ``dims`` with a size must match it."""

    def expected() -> str:
        shape = ", ".join(label if size is None else f"{label}={size}" for label, size in dims)
        return f"{' or '.join(map(_name, dtypes))} [{shape}]"

    if not isinstance(value, torch.Tensor):
        _fail(TypeError, function, name, expected(), describe(value))
    if value.dtype not in dtypes:
        _fail(TypeError, function, name, expected(), describe(value))
    shape = value.shape
    if len(shape) != len(dims) or any(
        size is not None and size != got for (_, size), got in zip(dims, shape, strict=True)
    ):
        _fail(ValueError, function, name, expected(), describe(value))
    if device is not None and value.device != device:
        _fail(ValueError, function, name, f"on {device} like the other arguments", f"a tensor on {value.device}")
    return value


def _integer(function: str, name: str, value: Any, low: int, high: int | None = None) -> None:
    """Check an integer; without ``high`` it has to fit the kernels' int32."""
    expected = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
    if isinstance(value, bool) or not isinstance(value, int):
        _fail(TypeError, function, name, expected, describe(value))
    if high is None and value > MAX_INT32:
        _fail(ValueError, function, name, f"an integer in {low}..{MAX_INT32}", str(value))
    if value < low or (high is not None and value > high):
        _fail(ValueError, function, name, expected, str(value))


def _positive(function: str, name: str, size: int, label: str) -> None:
    if size < 1:
        _fail(ValueError, function, name, f"of at least one {label}", "none")


def _topk(function: str, topk_idx: Any, kv_heads: int | None = None, tokens: int | None = None) -> None:
    _tensor(function, "topk_idx", topk_idx, _INT32, (("kv_heads", kv_heads), ("tokens", tokens), ("k", None)))
    _positive(function, "topk_idx", topk_idx.shape[0], "KV head")
    _positive(function, "topk_idx", topk_idx.shape[2], "page per query (k)")
    if topk_idx.is_cuda and topk_idx.stride(2) != 1:
        _fail(ValueError, function, "topk_idx", "contiguous along k", f"stride {topk_idx.stride(2)}")


def _lengths(
    function: str,
    device: torch.device,
    tokens: int,
    cu_seqlens: Any,
    **per_request: Any,
) -> None:
    """Check ``cu_seqlens`` and the int32 ``[requests]`` tensors that go with it."""
    _tensor(function, "cu_seqlens", cu_seqlens, _INT32, (("requests + 1", None),), device)
    _positive(function, "cu_seqlens", cu_seqlens.shape[0], "element")
    requests = cu_seqlens.shape[0] - 1
    for name, value in per_request.items():
        _tensor(function, name, value, _INT32, (("requests", requests),), device)
    for name, value in {"cu_seqlens": cu_seqlens, **per_request}.items():
        if not value.is_contiguous():
            _fail(ValueError, function, name, "contiguous", f"stride {value.stride(0)}")
    if device.type != "cpu":
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        _fail(ValueError, function, "cu_seqlens", "0 in its first element", str(bounds[0]))
    for request, (start, end) in enumerate(pairwise(bounds)):
        if end < start:
            _fail(ValueError, function, "cu_seqlens", "non-decreasing", f"{start} then {end} at request {request}")
    if bounds[-1] > tokens:
        _fail(ValueError, function, "cu_seqlens", f"at most tokens={tokens} in its last element", str(bounds[-1]))
    for name, value in per_request.items():
        if requests and int(value.min()) < 0:
            _fail(ValueError, function, name, ">= 0 everywhere", str(int(value.min())))
    for request, (prefix, (start, end)) in enumerate(
        zip(per_request["prefix_lens"].tolist(), pairwise(bounds), strict=True)
    ):
        if prefix + end - start > MAX_INT32:
            expected = f"at most {MAX_INT32} with the chunk's tokens added"
            _fail(ValueError, function, "prefix_lens", expected, f"{prefix} + {end - start} at request {request}")


def _grouping(function: str, window: Any, group_size: Any, page_size: Any) -> None:
    _integer(function, "window", window, 1)
    _integer(function, "group_size", group_size, 1, MAX_GROUP_SIZE)
    _integer(function, "page_size", page_size, 1)


def check_regroup(
    topk_idx: Any,
    cu_seqlens: Any,
    prefix_lens: Any,
    *,
    window: Any,
    group_size: Any,
    page_size: Any,
    capacity: Any,
    guard: Any,
    visits: Any,
) -> None:
    """Check the arguments of ``regroup``. Raises TypeError or ValueError."""
    function = "regroup"
    _topk(function, topk_idx)
    _lengths(function, topk_idx.device, topk_idx.shape[1], cu_seqlens, prefix_lens=prefix_lens)
    _grouping(function, window, group_size, page_size)
    if capacity is not None:
        _integer(function, "capacity", capacity, 1)
    if guard not in GUARDS:
        _fail(ValueError, function, "guard", " or ".join(map(repr, GUARDS)), repr(guard))
    if visits is not None:
        _tensor(function, "visits", visits, (torch.int64,), (("original and returned", 2),), topk_idx.device)
        if not visits.is_contiguous():
            _fail(ValueError, function, "visits", "contiguous", f"stride {visits.stride(0)}")


def check_regroup_kernel(topk_idx: torch.Tensor, *, window: int) -> None:
    """Check what only the CUDA kernel of ``regroup`` demands, after :func:`check_regroup`. Raises ValueError."""
    _kernel_k("regroup", topk_idx)
    if window not in (64, 128):
        _fail(ValueError, "regroup", "window", "64 or 128 on CUDA", str(window))


def check_unions(
    topk_idx: Any,
    perm: Any,
    cu_seqlens: Any,
    seq_lens: Any,
    prefix_lens: Any,
    *,
    window: Any,
    group_size: Any,
    page_size: Any,
) -> None:
    """Check the arguments of ``prepare_unions``. Raises TypeError or ValueError."""
    function = "prepare_unions"
    _topk(function, topk_idx)
    kv_heads, tokens, _ = topk_idx.shape
    _lengths(function, topk_idx.device, tokens, cu_seqlens, seq_lens=seq_lens, prefix_lens=prefix_lens)
    _grouping(function, window, group_size, page_size)
    if perm is None:
        return
    _tensor(function, "perm", perm, _INT32, (("kv_heads", kv_heads), ("tokens", tokens)), topk_idx.device)
    if not perm.is_contiguous():
        _fail(ValueError, function, "perm", "contiguous", f"strides {tuple(perm.stride())}")
    if perm.device.type == "cpu":
        _permutation(function, perm, cu_seqlens.tolist())


def _permutation(function: str, perm: torch.Tensor, bounds: list[int]) -> None:
    """Check that ``perm`` holds every request's own token ids exactly once (the padding rows are not looked at)."""
    for request, (start, end) in enumerate(pairwise(bounds)):
        ids = torch.arange(start, end, dtype=torch.int32)
        wrong = (perm[:, start:end].sort(dim=1).values != ids).nonzero()
        if wrong.numel():
            head = int(wrong[0, 0])
            expected = f"a permutation of the token ids {start}..{end - 1} for request {request}"
            _fail(ValueError, function, "perm", expected, f"another set of ids for KV head {head}")


def check_unions_kernel(topk_idx: torch.Tensor, *, group_size: int) -> None:
    """Check what only the CUDA kernel of ``prepare_unions`` demands. Raises ValueError."""
    _kernel_k("prepare_unions", topk_idx)
    if group_size > 16:
        _fail(ValueError, "prepare_unions", "group_size", "an integer in 1..16 on CUDA", str(group_size))


def _kernel_k(function: str, topk_idx: torch.Tensor) -> None:
    if topk_idx.shape[2] > 16:
        _fail(ValueError, function, "topk_idx", "of k <= 16 on CUDA", f"k={topk_idx.shape[2]}")


def check_sparse_prefill(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    topk_idx: Any,
    req_to_token: Any,
    slot_ids: Any,
    cu_seqlens: Any,
    seq_lens: Any,
    prefix_lens: Any,
    *,
    sm_scale: Any,
    k_scale: Any,
    v_scale: Any,
    page_size: Any,
    config: Any,
    workspace: Any,
    value_tiles: Any,
    decision: Any,
    out: Any,
) -> None:
    """Check the arguments of ``sparse_prefill``. Raises TypeError or ValueError."""
    function = "sparse_prefill"
    _tensor(function, "q", q, Q_DTYPES, (("tokens", None), ("q_heads", None), ("head_dim", None)))
    device = q.device
    tokens, q_heads, head_dim = q.shape
    cache_dims = (("slots", None), ("kv_heads", None), ("head_dim", head_dim))
    _tensor(function, "k_cache", k_cache, CACHE_DTYPES, cache_dims, device)
    slots, kv_heads, _ = k_cache.shape
    _positive(function, "k_cache", kv_heads, "KV head")
    _positive(function, "q", head_dim, "element per head (head_dim)")
    cache_dims = (("slots", slots), ("kv_heads", kv_heads), ("head_dim", head_dim))
    _tensor(function, "v_cache", v_cache, (k_cache.dtype,), cache_dims, device)
    if q_heads < 1 or q_heads % kv_heads:
        _fail(ValueError, function, "q", f"of a multiple of kv_heads={kv_heads} query heads", str(q_heads))
    _topk(function, topk_idx, kv_heads, tokens)
    if topk_idx.device != device:
        _fail(ValueError, function, "topk_idx", f"on {device} like the other arguments", f"one on {topk_idx.device}")
    _tensor(function, "req_to_token", req_to_token, _INT32, (("request slots", None), ("positions", None)), device)
    _lengths(function, device, tokens, cu_seqlens, seq_lens=seq_lens, prefix_lens=prefix_lens)
    requests = cu_seqlens.shape[0] - 1
    _tensor(function, "slot_ids", slot_ids, (torch.int32, torch.int64), (("requests", requests),), device)
    for name, value in (("sm_scale", sm_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        _scale(function, name, value, device)
    _integer(function, "page_size", page_size, 1)
    _config(function, config)
    if out is not None:
        dims = (("tokens", tokens), ("q_heads", q_heads), ("head_dim", head_dim))
        _tensor(function, "out", out, (q.dtype,), dims, device)
        if not out.is_contiguous():
            _fail(ValueError, function, "out", "contiguous", f"strides {tuple(out.stride())}")
    if decision is not None:
        _decision(function, decision, config, device)
    if workspace is not None:
        _workspace(function, workspace, q, k_cache, topk_idx, requests, page_size, config)
    if value_tiles is not None:
        _value_tiles(function, value_tiles, kv_heads, slots // page_size, device)
    if device.type == "cpu" and requests:
        _tables(function, req_to_token, slot_ids, seq_lens)


def check_sparse_prefill_kernel(req_to_token: torch.Tensor, slot_ids: torch.Tensor, out: torch.Tensor | None) -> None:
    """Check what only the CUDA kernels of ``sparse_prefill`` demand of valid arguments. Raises ValueError."""
    function = "sparse_prefill"
    positions = req_to_token.shape[1]
    row, step = req_to_token.stride()
    if step != 1 and positions > 1:
        _fail(ValueError, function, "req_to_token", "contiguous along its last dimension", f"stride {step}")
    if row < positions:  # the kernel takes the stride for the row's length
        _fail(ValueError, function, "req_to_token", f"of rows at least {positions} elements apart", f"stride {row}")
    if not slot_ids.is_contiguous():
        _fail(ValueError, function, "slot_ids", "contiguous", f"stride {slot_ids.stride(0)}")
    if out is not None and out.data_ptr() % 16:
        _fail(ValueError, function, "out", "at an address that is a multiple of 16", hex(out.data_ptr()))


def _scale(function: str, name: str, value: Any, device: torch.device) -> None:
    if value is None:
        return
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:
            _fail(ValueError, function, name, "finite", f"{type(value).__name__} {str(value)[:20]}")
        return
    tensor_allowed = name != "sm_scale"
    expected = "None, a float or a float32 tensor of one element" if tensor_allowed else "None or a float"
    if not tensor_allowed or not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        _fail(TypeError, function, name, expected, describe(value))
    if value.numel() != 1:
        _fail(ValueError, function, name, expected, describe(value))
    if value.device.type != "cpu" and value.device != device:
        _fail(ValueError, function, name, f"on {device} like the other arguments", f"a tensor on {value.device}")


def check_history(config: Any, *, page_size: Any, heads_per_kv_head: Any, max_keys: Any) -> None:
    """Raise TypeError or ValueError unless a :class:`pageweaver_sglang.History` can be made of these."""
    if not isinstance(config, Config):
        _fail(TypeError, "History", "config", "a pageweaver_sglang.Config", describe(config))
    _integer("History", "page_size", page_size, 1)
    _integer("History", "heads_per_kv_head", heads_per_kv_head, 1)
    _integer("History", "max_keys", max_keys, 1)


def check_decide(topk_idx: Any) -> None:
    """Raise TypeError or ValueError unless a history can decide for a call with these picks."""
    _topk("History.decide", topk_idx)


def _config(function: str, config: Any) -> None:
    if config is None:
        return
    if not isinstance(config, Config):
        _fail(TypeError, function, "config", "a pageweaver_sglang.Config", describe(config))
    if config.mode == "native":
        _fail(
            ValueError,
            function,
            "config",
            "of mode 'union8', 'pageweaver' or 'auto' ('native' is SGLang's own path, which only the plugin can take)",
            "mode 'native'",
        )


def _decision(function: str, decision: Any, config: Config | None, device: torch.device) -> None:
    from .auto.history import Decision

    if not isinstance(decision, Decision):
        _fail(TypeError, function, "decision", "what pageweaver_sglang.History.decide returns", describe(decision))
    mode = (config or Config()).mode
    if mode != "auto":
        _fail(ValueError, function, "decision", "None unless the mode is 'auto'", f"a decision in mode {mode!r}")
    measurement = decision.measurement
    if measurement is not None and measurement.visits.device != device:  # where the regroup kernel would write
        expected = f"of a History of calls on {device} like the other arguments"
        _fail(ValueError, function, "decision", expected, f"one that counts on {measurement.visits.device}")


def _workspace(
    function: str,
    workspace: Workspace,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    requests: int,
    page_size: int,
    config: Config | None,
) -> None:
    from .workspace import Workspace

    if not isinstance(workspace, Workspace):
        _fail(TypeError, function, "workspace", "a pageweaver_sglang.Workspace", describe(workspace))
    tokens, q_heads, head_dim = q.shape
    kv_heads, _, k = topk_idx.shape
    config = config or Config()
    wanted: dict[str, Any] = {
        "kv_heads": kv_heads,
        "topk": k,
        "window": config.window,
        "device": q.device,
    }
    if workspace.q_heads is not None:
        wanted |= {"q_heads": q_heads, "head_dim": head_dim, "dtype": q.dtype}
    for name, value in wanted.items():
        if getattr(workspace, name) != value:
            _fail(ValueError, function, "workspace", f"one with {name}={value}", f"{name}={getattr(workspace, name)}")
    sizes = support.call_grouping(config, q, k_cache, page_size).unions
    if workspace.group_size not in sizes:
        allowed = " or ".join(map(str, sizes))
        _fail(ValueError, function, "workspace", f"one with group_size={allowed}", f"group_size={workspace.group_size}")
    workspace.check_fits(tokens, requests)


def _value_tiles(function: str, value_tiles: Any, kv_heads: int, pool_pages: int, device: torch.device) -> None:
    from .value_tiles import TILE_BYTES, ValueTiles

    if not isinstance(value_tiles, ValueTiles):
        _fail(TypeError, function, "value_tiles", "a pageweaver_sglang.ValueTiles", describe(value_tiles))
    for name, dtype, shape in (
        ("marks", torch.int32, (kv_heads, pool_pages)),
        ("tiles", torch.uint8, (kv_heads, pool_pages, TILE_BYTES)),
    ):
        tensor = getattr(value_tiles, name)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != shape:
            wanted = f"of {name} {str(dtype).removeprefix('torch.')} {list(shape)}"
            _fail(ValueError, function, "value_tiles", wanted, f"{name} {describe(tensor)}")
        if tensor.device != device:
            _fail(ValueError, function, "value_tiles", f"of {name} on {device}", f"{name} on {tensor.device}")
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            _fail(ValueError, function, "value_tiles", f"of contiguous {name} at a multiple of 16 bytes", "others")


def _tables(function: str, req_to_token: torch.Tensor, slot_ids: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Check the contents of the CPU tensors that lead from a request to its tokens' cache slots."""
    rows, positions = req_to_token.shape
    low, high = int(slot_ids.min()), int(slot_ids.max())
    if low < 0 or high >= rows:
        _fail(ValueError, function, "slot_ids", f"in 0..{rows - 1} (rows of req_to_token)", f"{low}..{high}")
    longest = int(seq_lens.max())
    if longest > positions:
        _fail(ValueError, function, "seq_lens", f"at most positions={positions} of req_to_token", str(longest))

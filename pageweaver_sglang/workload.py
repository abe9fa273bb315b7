"""Workload files: the indexer's picks of one Step 3 call, and optionally its tensors, in one ``.npz``."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Arrays of a file: dtypes in the file and dimensions. NumPy has neither bf16 nor e4m3: those are kept as raw bits.
_REQUIRED = {
    "topk_idx": (("int32",), ("kv_heads", "tokens", "k")),
    "cu_seqlens": (("int32",), ("requests + 1",)),
    "prefix_lens": (("int32",), ("requests",)),
    "seq_lens": (("int32",), ("requests",)),
    "page_size": (("int32",), ()),
}
_OPTIONAL = {
    "q": (("uint16",), ("tokens", "q_heads", "head_dim")),
    "k_pages": (("uint8", "uint16"), ("pages", "page_size", "kv_heads", "head_dim")),
    "v_pages": (("uint8", "uint16"), ("pages", "page_size", "kv_heads", "head_dim")),
    "page_ids": (("int32",), ("pages",)),
    "page_requests": (("int32",), ("pages",)),
    "page_slots": (("int32",), ("pages",)),
    "out": (("uint16",), ("tokens", "q_heads", "head_dim")),
    "sm_scale": (("float64",), ()),
    "k_scale": (("float64",), ()),
    "v_scale": (("float64",), ()),
    "layer": (("int32",), ()),
}
_BITS = {"uint16": torch.bfloat16, "uint8": torch.float8_e4m3fn}
_TORCH = _BITS | {"int32": torch.int32}


@dataclass(frozen=True, eq=False)
class Workload:
    """One Step 3 call; CPU tensors.

    Attributes:
        topk_idx: int32 ``[kv_heads, tokens, k]``, logical pages picked.
        cu_seqlens: int32 ``[requests + 1]``.
        prefix_lens: int32 ``[requests]``.
        seq_lens: int32 ``[requests]``.
        page_size: tokens per page.
        q: bfloat16 ``[tokens, q_heads, head_dim]``.
        k_pages: float8_e4m3fn or bfloat16 ``[pages, page_size, kv_heads, head_dim]``: entry ``j`` holds the tokens of
            logical page ``page_ids[j]`` of request ``page_requests[j]``.
        v_pages: like ``k_pages``.
        page_ids: int32 ``[pages]``, logical pages, distinct within a request.
        page_requests: int32 ``[pages]``, request of each page; needed when there are several requests.
        page_slots: int32 ``[pages]``, physical page of each in the pool that it was captured from.
        out: bfloat16, shape of ``q``: what the server that it was captured from computed.
        sm_scale: factor of the scores; ``None`` is ``head_dim ** -0.5``.
        k_scale: factor of the K cache; ``None`` is 1.
        v_scale: factor of the V cache; ``None`` is 1.
        layer: model layer that the call belongs to.

    Raises:
        ValueError: an array has a wrong dtype, shape or value; the message names it.
    """

    topk_idx: torch.Tensor
    cu_seqlens: torch.Tensor
    prefix_lens: torch.Tensor
    seq_lens: torch.Tensor
    page_size: int
    q: torch.Tensor | None = None
    k_pages: torch.Tensor | None = None
    v_pages: torch.Tensor | None = None
    page_ids: torch.Tensor | None = None
    page_slots: torch.Tensor | None = None
    out: torch.Tensor | None = None
    page_requests: torch.Tensor | None = None
    sm_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    layer: int | None = None

    def __post_init__(self) -> None:
        try:
            _check(self)
        except ValueError as error:
            raise ValueError(f"Workload: {error}") from None

    def attention_arguments(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Return the arguments of ``sparse_prefill`` for this call, with a KV pool of just its pages.

        Physical page ``j`` holds entry ``j`` of ``k_pages``. Tokens of pages that the file lacks lead to slot 0.
        ``sm_scale``, ``k_scale`` and ``v_scale`` are among the arguments where the file has them.

        Raises:
            ValueError: the workload holds indices only.
        """
        if self.q is None or self.k_pages is None or self.v_pages is None or self.page_ids is None:
            raise ValueError("Workload: no q, k_pages, v_pages and page_ids: it holds indices only")
        requests = len(self.seq_lens)
        last = -(-int(self.seq_lens.max()) // self.page_size)
        first_slots = torch.zeros(requests, max(last, int(self.page_ids.max()) + 1), dtype=torch.int32)
        first_slots[self.requests_of_pages(), self.page_ids.long()] = (
            torch.arange(len(self.page_ids), dtype=torch.int32) * self.page_size
        )
        req_to_token = first_slots[..., None] + torch.arange(self.page_size, dtype=torch.int32)
        tensors: dict[str, torch.Tensor] = {
            "q": self.q,
            "k_cache": self.k_pages.flatten(0, 1),
            "v_cache": self.v_pages.flatten(0, 1),
            "topk_idx": self.topk_idx,
            "req_to_token": req_to_token.flatten(1),
            "slot_ids": torch.arange(requests, dtype=torch.int64),
            "cu_seqlens": self.cu_seqlens,
            "seq_lens": self.seq_lens,
            "prefix_lens": self.prefix_lens,
        }
        scales = {name: getattr(self, name) for name in ("sm_scale", "k_scale", "v_scale")}
        arguments: dict[str, Any] = {name: value.to(device) for name, value in tensors.items()}
        arguments |= {name: value for name, value in scales.items() if value is not None}
        return arguments | {"page_size": self.page_size}

    def requests_of_pages(self) -> torch.Tensor:
        """Return the request of every stored page, int64 ``[pages]``; raises ValueError when it holds indices only."""
        if self.page_ids is None:
            raise ValueError("Workload: no page_ids: it holds indices only")
        if self.page_requests is None:
            return torch.zeros(len(self.page_ids), dtype=torch.int64)
        return self.page_requests.long()

    def save(self, path: str | os.PathLike[str], *, compress: bool = True) -> None:
        """Write an ``.npz``.

        Args:
            path: the file; its name must end in ``.npz``.
            compress: whether to. Indices shrink to a fraction, activations hardly, and it takes a second per 20 MB.

        Raises:
            ValueError: the file's name ends otherwise.
            OSError: writing fails.
        """
        path = Path(path)
        if path.suffix != ".npz":
            raise ValueError(f"Workload: the file's name must end in .npz, got {path.name}")
        arrays: dict[str, np.ndarray] = {}
        for name, (dtypes, dims) in (_REQUIRED | _OPTIONAL).items():
            value = getattr(self, name)
            if value is not None:
                arrays[name] = _to_numpy(value) if dims else np.array(value, dtype=dtypes[0])
        write: Any = np.savez_compressed if compress else np.savez
        write(path, **arrays)


def load_workload(path: str | os.PathLike[str]) -> Workload:
    """Read a workload file. Pickled content is refused.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is no ``.npz``, lacks an array, has one too many, or one of a wrong dtype, shape or value.
    """
    path = Path(path)
    arrays = _read(path)
    missing = [name for name in _REQUIRED if name not in arrays]
    if missing:
        raise ValueError(f"load_workload: {path}: lacks {', '.join(missing)}")
    known = _REQUIRED | _OPTIONAL
    for name, array in arrays.items():
        if name not in known:
            raise ValueError(f"load_workload: {path}: unknown array {name}; known: {', '.join(known)}")
        dtypes, dims = known[name]
        if str(array.dtype) not in dtypes or array.ndim != len(dims):
            got = f"{array.dtype} {list(array.shape)}"
            expected = f"{' or '.join(dtypes)} [{', '.join(dims)}]"
            raise ValueError(f"load_workload: {path}: {name} must be {expected}, got {got}")
    values: dict[str, Any] = {
        name: _to_torch(array) if known[name][1] else array.item() for name, array in arrays.items()
    }
    try:
        return Workload(**values)
    except ValueError as error:
        raise ValueError(f"load_workload: {path}: {str(error).removeprefix('Workload: ')}") from None


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it is a single array")
        with archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        # numpy takes any file that starts like none of its own for a pickle; its advice to load it leads astray.
        reason = "it is no zip archive" if "pickled (object) data" in str(error) else error
        raise ValueError(f"load_workload: {path}: cannot be read as an .npz of plain arrays: {reason}") from None


def _to_torch(array: np.ndarray) -> torch.Tensor:
    bits = _BITS.get(str(array.dtype))
    if array.dtype == np.uint16:
        array = array.view(np.int16)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if bits is None else tensor.view(bits)


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def _check(workload: Workload) -> None:
    """Raise ValueError naming the array that is wrong."""
    if isinstance(workload.page_size, bool) or not isinstance(workload.page_size, int) or workload.page_size < 1:
        raise ValueError(f"page_size must be an integer >= 1, got {workload.page_size!r}")
    sizes = {"page_size": workload.page_size}
    for name, (dtypes, dims) in (_REQUIRED | _OPTIONAL).items():
        value = getattr(workload, name)
        if name == "page_size" or (value is None and name in _OPTIONAL):
            continue
        if dims:
            _check_tensor(name, value, tuple(_TORCH[dtype] for dtype in dtypes), dims, sizes)
        else:
            _check_number(name, value, dtypes[0])
    _check_lengths(workload, sizes)
    _check_pages(workload, sizes)


def _check_tensor(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], dims: tuple[str, ...], sizes: dict[str, int]
) -> None:
    """Check one tensor; sizes that it is the first to have are added to ``sizes``."""
    label = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    shape = ", ".join(f"{dim}={sizes[dim]}" if dim in sizes else dim for dim in dims)
    got = type(tensor).__name__
    if isinstance(tensor, torch.Tensor):
        got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        if tensor.dtype in dtypes and tensor.dim() == len(dims):
            for dim, size in zip(dims, tensor.shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    break
            else:
                if dims == ("requests + 1",):
                    sizes["requests"] = tensor.shape[0] - 1
                return
    raise ValueError(f"{name} must be {label} [{shape}], got {got}")


def _check_number(name: str, value: float, dtype: str) -> None:
    """Check a scale (finite) or the layer's id (>= 0)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if dtype == "int32":
        if not number or not isinstance(value, int) or not 0 <= value < 2**31:
            raise ValueError(f"{name} must be an integer in 0..2**31-1, got {value!r}")
    elif not number or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")


def _check_lengths(workload: Workload, sizes: dict[str, int]) -> None:
    bounds = workload.cu_seqlens
    if sizes["requests"] < 1:
        raise ValueError("cu_seqlens must have at least one request, got none")
    if int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must begin with 0 and not decrease, got {bounds.tolist()}")
    if int(bounds[-1]) > sizes["tokens"]:
        raise ValueError(f"cu_seqlens must end at most at tokens={sizes['tokens']}, got {int(bounds[-1])}")
    for name in ("prefix_lens", "seq_lens"):
        lowest = int(getattr(workload, name).min())
        if lowest < 0:
            raise ValueError(f"{name} must be >= 0 everywhere, got {lowest}")


def _check_pages(workload: Workload, sizes: dict[str, int]) -> None:
    together = {"k_pages": workload.k_pages, "v_pages": workload.v_pages, "page_ids": workload.page_ids}
    given = [name for name, tensor in together.items() if tensor is not None]
    if given and len(given) < len(together):
        raise ValueError(f"{', '.join(together)} must be given together, got {', '.join(given)}")
    for name in ("page_slots", "page_requests"):
        if getattr(workload, name) is not None and workload.page_ids is None:
            raise ValueError(f"{name} must be given with page_ids")
    if workload.k_pages is not None and workload.v_pages is not None:
        kinds = [str(pages.dtype).removeprefix("torch.") for pages in (workload.k_pages, workload.v_pages)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"v_pages must be {kinds[0]} like k_pages, got {kinds[1]}")
    if workload.page_ids is not None:
        _check_page_ids(workload, workload.page_ids, sizes["requests"])
    if "q_heads" in sizes and sizes["q_heads"] % sizes["kv_heads"]:
        raise ValueError(f"q must have a multiple of kv_heads={sizes['kv_heads']} heads, got {sizes['q_heads']}")


def _check_page_ids(workload: Workload, ids: torch.Tensor, requests: int) -> None:
    if workload.page_requests is None and requests != 1:
        raise ValueError(f"page_ids must come with page_requests when there are several requests, got {requests}")
    owners = workload.requests_of_pages()
    if len(ids) < 1 or int(owners.min()) < 0 or int(owners.max()) >= requests:
        raise ValueError(f"page_requests must be in 0..{requests - 1} and name at least one page")
    pages = -(-workload.seq_lens.long() // workload.page_size)
    if bool((ids < 0).any()) or bool((ids >= pages[owners]).any()):
        raise ValueError(f"page_ids must be distinct ids in 0..{int(pages.max()) - 1}, inside their request")
    if len((owners * int(pages.max()) + ids).unique()) != len(ids):
        raise ValueError(f"page_ids must be distinct ids in 0..{int(pages.max()) - 1} in every request")

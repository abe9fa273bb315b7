"""Workload files: the indexer's picks of one Step 3 call, and optionally its tensors, in one ``.npz``."""

from __future__ import annotations

import os
import zipfile
import zlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

# Arrays of a file: dtype in the file and dimensions. NumPy has neither bf16 nor e4m3: those are kept as raw bits.
_REQUIRED = {
    "topk_idx": ("int32", ("kv_heads", "tokens", "k")),
    "cu_seqlens": ("int32", ("requests + 1",)),
    "prefix_lens": ("int32", ("requests",)),
    "seq_lens": ("int32", ("requests",)),
    "page_size": ("int32", ()),
}
_OPTIONAL = {
    "q": ("uint16", ("tokens", "q_heads", "head_dim")),
    "k_pages": ("uint8", ("pages", "page_size", "kv_heads", "head_dim")),
    "v_pages": ("uint8", ("pages", "page_size", "kv_heads", "head_dim")),
    "page_ids": ("int32", ("pages",)),
    "page_slots": ("int32", ("pages",)),
    "out": ("uint16", ("tokens", "q_heads", "head_dim")),
}
_BITS = {"q": torch.bfloat16, "out": torch.bfloat16, "k_pages": torch.float8_e4m3fn, "v_pages": torch.float8_e4m3fn}


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
        k_pages: float8_e4m3fn ``[pages, page_size, kv_heads, head_dim]``: entry ``j`` holds the tokens of logical page
            ``page_ids[j]`` of the one request.
        v_pages: like ``k_pages``.
        page_ids: int32 ``[pages]``, distinct logical pages.
        page_slots: int32 ``[pages]``, physical page of each in the pool that it was captured from.
        out: bfloat16, shape of ``q``: what SGLang's own path computed.

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

    def __post_init__(self) -> None:
        try:
            _check(self)
        except ValueError as error:
            raise ValueError(f"Workload: {error}") from None

    def attention_arguments(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor | int]:
        """Return the arguments of ``sparse_prefill`` for this call, with a KV pool of just its pages.

        Physical page ``j`` holds entry ``j`` of ``k_pages``. Tokens of pages that the file lacks lead to slot 0.

        Raises:
            ValueError: the workload holds indices only.
        """
        if self.q is None or self.k_pages is None or self.v_pages is None or self.page_ids is None:
            raise ValueError("Workload: no q, k_pages, v_pages and page_ids: it holds indices only")
        pages = len(self.page_ids)
        last = -(-int(self.seq_lens.max()) // self.page_size)
        first_slots = torch.zeros(max(last, int(self.page_ids.max()) + 1), dtype=torch.int32)
        first_slots[self.page_ids.long()] = torch.arange(pages, dtype=torch.int32) * self.page_size
        req_to_token = first_slots[:, None] + torch.arange(self.page_size, dtype=torch.int32)
        arguments: dict[str, torch.Tensor] = {
            "q": self.q,
            "k_cache": self.k_pages.flatten(0, 1),
            "v_cache": self.v_pages.flatten(0, 1),
            "topk_idx": self.topk_idx,
            "req_to_token": req_to_token.view(1, -1),
            "slot_ids": torch.zeros(1, dtype=torch.int64),
            "cu_seqlens": self.cu_seqlens,
            "seq_lens": self.seq_lens,
            "prefix_lens": self.prefix_lens,
        }
        return {name: value.to(device) for name, value in arguments.items()} | {"page_size": self.page_size}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a compressed ``.npz``. Raises ValueError when the name ends otherwise, OSError when writing fails."""
        path = Path(path)
        if path.suffix != ".npz":
            raise ValueError(f"Workload: the file's name must end in .npz, got {path.name}")
        arrays = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                arrays[field.name] = _to_numpy(value)
        np.savez_compressed(path, page_size=np.int32(self.page_size), **arrays)


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
        dtype, dims = known[name]
        if array.dtype != np.dtype(dtype) or array.ndim != len(dims):
            got = f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"load_workload: {path}: {name} must be {dtype} [{', '.join(dims)}], got {got}")
    values = {name: _to_torch(name, array) for name, array in arrays.items() if name != "page_size"}
    try:
        return Workload(page_size=int(arrays["page_size"]), **values)
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
        raise ValueError(f"load_workload: {path}: cannot be read as an .npz of plain arrays: {error}") from None


def _to_torch(name: str, array: np.ndarray) -> torch.Tensor:
    if array.dtype == np.uint16:
        array = array.view(np.int16)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(_BITS[name]) if name in _BITS else tensor


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
    for name, (_, dims) in (_REQUIRED | _OPTIONAL).items():
        tensor = getattr(workload, name)
        if name == "page_size" or (tensor is None and name in _OPTIONAL):
            continue
        _check_tensor(name, tensor, _BITS.get(name, torch.int32), dims, sizes)
    _check_lengths(workload, sizes)
    _check_pages(workload, sizes)


def _check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, dims: tuple[str, ...], sizes: dict[str, int]
) -> None:
    """Check one tensor; sizes that it is the first to have are added to ``sizes``."""
    label = str(dtype).removeprefix("torch.")
    shape = ", ".join(f"{dim}={sizes[dim]}" if dim in sizes else dim for dim in dims)
    got = type(tensor).__name__
    if isinstance(tensor, torch.Tensor):
        got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        if tensor.dtype == dtype and tensor.dim() == len(dims):
            for dim, size in zip(dims, tensor.shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    break
            else:
                if dims == ("requests + 1",):
                    sizes["requests"] = tensor.shape[0] - 1
                return
    raise ValueError(f"{name} must be {label} [{shape}], got {got}")


def _check_lengths(workload: Workload, sizes: dict[str, int]) -> None:
    bounds = workload.cu_seqlens
    if sizes["requests"] < 1 or int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()):
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
    if workload.page_slots is not None and workload.page_ids is None:
        raise ValueError("page_slots must be given with page_ids")
    if workload.page_ids is not None:
        if sizes["requests"] != 1:
            raise ValueError(f"page_ids must come with one request, got {sizes['requests']}")
        ids = workload.page_ids
        pages = -(-int(workload.seq_lens.max()) // workload.page_size)
        if len(ids) < 1 or int(ids.min()) < 0 or int(ids.max()) >= pages or len(ids.unique()) != len(ids):
            raise ValueError(f"page_ids must be distinct ids in 0..{pages - 1}")
    if "q_heads" in sizes and sizes["q_heads"] % sizes["kv_heads"]:
        raise ValueError(f"q must have a multiple of kv_heads={sizes['kv_heads']} heads, got {sizes['q_heads']}")

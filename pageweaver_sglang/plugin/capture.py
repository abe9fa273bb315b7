"""What a recording of Step 3 calls needs to know of SGLang: the rank, the chunk size, a batch's lengths."""

from __future__ import annotations

from typing import Any

import torch

from pageweaver_sglang.capture.control import CaptureError
from pageweaver_sglang.capture.recorder import Recorder
from pageweaver_sglang.capture.snapshot import HostLengths
from pageweaver_sglang.config import Config

from . import NAME, compat
from .options import BackendError


def make_recorder(config: Config, runner: Any, pool_page_size: int) -> Recorder | None:
    """The recorder that the settings ask for, or None.

    Raises:
        BackendError: the folder cannot be used.
    """
    if config.capture_dir is None:
        return None
    (chunk_size,) = compat.get_fields(runner.server_args, "chunked_prefill_size")
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    try:
        return Recorder(
            config,
            device=runner.req_to_token_pool.req_to_token.device,
            pool_page_size=pool_page_size,
            chunk_size=chunk_size if chunk_size is not None and chunk_size > 0 else None,
            rank=torch.distributed.get_rank() if distributed else 0,
        )
    except CaptureError as error:
        raise BackendError(f"--attention-backend {NAME}: {error}") from error


def host_lengths(forward_batch: Any) -> HostLengths | None:
    """A batch's prefix and chunk lengths as SGLang keeps them on the host, or None where it does not."""
    prefixes = getattr(forward_batch, "extend_prefix_lens_cpu", None)
    chunks = getattr(forward_batch, "extend_seq_lens_cpu", None)
    if prefixes is None or chunks is None or len(prefixes) != len(chunks):
        return None
    return HostLengths(tuple(int(n) for n in prefixes), tuple(int(n) for n in chunks))

"""What ``pageweaver`` means among SGLang's server arguments.

PageWeaver acts in the prefill of sparse layers; everything else is an ordinary backend's. So the arguments are
*resolved* as if the dense backend alone had been asked for, with page size 128: SGLang then chooses whatever it would
choose for that backend (on Hopper and MiniMax-M3: fa3), and every rule of SGLang that names backends applies as it
does there. Only then the prefill backend's field gets the name ``pageweaver`` again::

    given:     --attention-backend pageweaver          or   --prefill-attention-backend pageweaver
    resolved:  attention_backend=fa3, prefill_attention_backend=pageweaver, page_size=128

That name is also the safety catch. A process of the server that somehow lacks the plugin doesn't know it, and stops.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from pageweaver_sglang.config import load_config

from . import NAME, compat

logger = logging.getLogger(__name__)

PAGE_SIZE = 128
"""Tokens per KV page that MiniMax-M3's sparse attention and the kernels share."""

_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


class BackendError(ValueError):
    """The server was asked for PageWeaver in a way that cannot work; the message says what to change."""


def is_requested(server_args: Any) -> bool:
    """Whether any of the backend arguments says ``pageweaver``."""
    return NAME in compat.get_fields(server_args, *_FIELDS)


def before_resolution(server_args: Any) -> None:
    """Replace ``pageweaver`` by the dense backend and settle the page size.

    Raises:
        SeamError: this SGLang lacks something that PageWeaver needs.
        BackendError: arguments that contradict each other, or another page size than 128.
        ConfigError: a wrong ``PAGEWEAVER_*`` setting.
    """
    if problems := compat.verify_seams():
        raise compat.SeamError(compat.refusal(problems))
    given = compat.get_fields(server_args, *_FIELDS)
    attention, decode = dense_backends(given[0], given[1], given[2], load_config().dense_backend)
    (page_size,) = compat.get_fields(server_args, "page_size")
    _check_page_size(page_size if page_size is not None else PAGE_SIZE)
    compat.set_fields(
        server_args,
        attention_backend=attention,
        prefill_attention_backend=None,
        decode_attention_backend=decode,
        page_size=PAGE_SIZE,
    )


def after_resolution(server_args: Any) -> None:
    """Check what SGLang made of the arguments and put ``pageweaver`` back, as the prefill backend.

    Raises:
        BackendError: the model is not a MiniMax-M3 with sparse layers, or the dense backend forced another page size.
    """
    hf_config = compat.hf_config_of(server_args)
    if hf_config is not None:
        check_model(hf_config)
        dense, page_size = compat.get_fields(server_args, "attention_backend", "page_size")
        _check_page_size(page_size, forced_by=dense)
        _leave_out_wrong_prefill_graphs(server_args)
    compat.set_fields(server_args, prefill_attention_backend=NAME)


def dense_backends(
    attention: str | None, prefill: str | None, decode: str | None, setting: str | None
) -> tuple[str | None, str | None]:
    """The (attention, decode) backends that serve everything but Step 3; None = SGLang chooses.

    Args:
        attention: ``--attention-backend``.
        prefill: ``--prefill-attention-backend``.
        decode: ``--decode-attention-backend``.
        setting: ``dense_backend`` of the configuration.

    Raises:
        BackendError: no reading of the four makes sense.
    """
    if NAME not in (attention, prefill):
        raise BackendError(
            f"--decode-attention-backend {NAME}: PageWeaver replaces a step of prefill only. "
            f"Use --attention-backend {NAME}; decode is served by the dense backend."
        )
    if prefill not in (None, NAME):
        raise BackendError(
            f"--attention-backend {NAME} with --prefill-attention-backend {prefill}: PageWeaver replaces a step of "
            f"prefill, so it would never act. Drop --prefill-attention-backend; to choose the backend of the dense "
            f"layers use --attention-backend {prefill} --prefill-attention-backend {NAME}."
        )
    dense = None if attention == NAME else attention
    if setting is not None:
        if setting == NAME or setting not in compat.resolve("sglang.srt.server_args:ATTENTION_BACKEND_CHOICES"):
            raise BackendError(f"PAGEWEAVER_DENSE_BACKEND: {setting!r} is not one of SGLang's attention backends")
        if dense not in (None, setting):
            raise BackendError(
                f"--attention-backend {dense} and the setting dense_backend={setting} name different backends for the "
                "dense layers; drop one of them."
            )
        dense = setting
    return dense, None if decode == NAME else decode


def check_model(hf_config: Any) -> None:
    """Raise BackendError unless the model has MiniMax-M3's sparse attention."""
    from sglang.srt.configs.model_config import is_minimax_sparse

    if not is_minimax_sparse(hf_config):
        architectures = ", ".join(getattr(hf_config, "architectures", None) or ["an unnamed architecture"])
        raise BackendError(
            f"--attention-backend {NAME} serves MiniMax-M3's sparse attention only, and this model ({architectures}) "
            "has none. Choose another attention backend."
        )


def _leave_out_wrong_prefill_graphs(server_args: Any) -> None:
    """Run prefill without a CUDA graph where SGLang's own would replay the sparse layers with the capture's lengths."""
    (config,) = compat.get_fields(server_args, "cuda_graph_config")
    graph = config.prefill.backend
    if not compat.captures_sparse_attention(graph):
        return
    logger.warning(
        "pageweaver: prefill runs without a CUDA graph: SGLang %s captures sparse attention inside its prefill graph "
        "%r, with the lengths of the capture: replays would attend to wrong tokens, with SGLang's own Step 3 too.",
        compat.sglang_version(),
        graph,
    )
    prefill = dataclasses.replace(config.prefill, backend="disabled")
    compat.set_fields(server_args, cuda_graph_config=dataclasses.replace(config, prefill=prefill))


def _check_page_size(page_size: int, forced_by: str | None = None) -> None:
    if page_size == PAGE_SIZE:
        return
    if forced_by is None:
        raise BackendError(
            f"--page-size {page_size}: --attention-backend {NAME} needs pages of {PAGE_SIZE} tokens. "
            f"Drop --page-size, or set --page-size {PAGE_SIZE}."
        )
    raise BackendError(
        f"the dense backend {forced_by!r} made SGLang choose --page-size {page_size}, and --attention-backend {NAME} "
        f"needs {PAGE_SIZE}. Choose another dense_backend."
    )

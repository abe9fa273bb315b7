"""SGLang versions: what differs between them, and whether the places PageWeaver uses still look as expected.

Differences handled, by the SGLang version that brought them:

======== ============================================================================== ===========================
version  difference                                                                     handled in
======== ============================================================================== ===========================
0.5.18   ``runtime_context.attention_backends()`` is what run-time code asks for the    :func:`hook_targets`
         (prefill, decode) pair; before, ``ServerArgs.get_attention_backends`` and, in
         the EAGLE draft factory, a field of the server arguments read by name
0.5.18   the sparse backend imports ``minimax_sparse_prefill`` inside                   none needed: the name that
         ``forward_extend``; before, at the top of the module                           is replaced is one level down
0.5.19   server arguments stay as given and decisions are *declared* beside them, in    :func:`hook_targets`,
         ``arg_groups.pipeline.run_resolution_pipeline``; before,                       :func:`set_fields`
         ``ServerArgs.__post_init__`` wrote them into the fields
0.5.20   the choices live in ``arg_groups.choices``                                     none needed: ``server_args``
                                                                                        still exports them
0.5.21   Step 3 has a parameter ``loc_mapping`` (HiSparse)                              :data:`STEP3_PARAMETERS`
0.5.22   prefill CUDA graph ``breakable`` runs sparse attention between its pieces;     ``options`` leaves out what
         before, it captured it. ``tc_piecewise``, which always ran it between them,    captures it
         is gone
0.5.23   MiniMax-M3.1 NVFP4 has a backend of its own on Blackwell                       ``backend.build`` refuses it
======== ============================================================================== ===========================
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from . import NAME

SUPPORTED = ("0.5.17", "0.5.23")
"""First and last SGLang version this was tested with."""

STEP3_MODULE = "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse"
STEP3_CALLER = "minimax_sparse_prefill"
STEP3_NAME = "flash_prefill_with_gqa_share_sparse"
# fmt: off
STEP3_PARAMETERS = frozenset({
    "q", "k_cache", "v_cache", "sink", "req_to_token", "slot_ids", "topk_idx", "block_size_q", "block_size_k",
    "cu_seqlens", "seq_lens", "prefix_lens", "max_seqlen_q", "sm_scale", "use_tma", "cu_seqblocks_q",
    "max_seqblock_q", "q_scale", "k_scale", "v_scale",
})
# fmt: on
STEP3_OPTIONAL_PARAMETERS = frozenset({"loc_mapping"})

_REGISTRY = "sglang.srt.layers.attention.attention_registry"
_SPARSE_BACKEND = "sglang.srt.layers.attention.minimax_sparse_backend"
_PIPELINE = "sglang.srt.arg_groups.pipeline"
_SETUP = "sglang.srt.model_executor.model_runner_components.attention_backend_setup"


class SeamError(RuntimeError):
    """A place in SGLang that PageWeaver needs is missing, changed, or was not reached; the message says which."""


def sglang_version() -> str:
    """The version of the SGLang that is imported, or ``not installed``."""
    try:
        return str(importlib.import_module("sglang").__version__)
    except ImportError:
        return "not installed"


def tested_version(version: str) -> bool:
    """Whether ``version`` lies in the tested range :data:`SUPPORTED`."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(SUPPORTED[0]) <= Version(version) <= Version(SUPPORTED[1])
    except InvalidVersion:
        return False


def refusal(problems: list[str]) -> str:
    """The message with which a server that was asked for PageWeaver stops."""
    return (
        f"PageWeaver cannot act in this SGLang: {'; '.join(problems)}. "
        f"Found SGLang {sglang_version()}; supported: {SUPPORTED[0]} to {SUPPORTED[1]}. "
        f"Install a supported version, or start the server without --attention-backend {NAME}."
    )


# Lookup ------------------------------------------------------------------------------------------------------------


def resolve(target: str) -> Any:
    """The object behind ``package.module:name.attribute``. Raises ImportError or AttributeError."""
    module, _, path = target.partition(":")
    found = importlib.import_module(module)
    for name in path.split(".") if path else ():
        found = getattr(found, name)
    return found


def exists(target: str) -> bool:
    """Whether :func:`resolve` finds ``target``."""
    try:
        resolve(target)
    except (ImportError, AttributeError):
        return False
    return True


def _parameters(target: str) -> list[str]:
    return list(inspect.signature(inspect.unwrap(resolve(target))).parameters)


# The seams -----------------------------------------------------------------------------------------------------------


def hook_targets() -> dict[str, str]:
    """The functions that :mod:`.hooks` wraps in this version: role -> target.

    ``arguments``   resolves the server arguments
    ``pair``        answers "which (prefill, decode) attention backends?" at run time
    ``draft``       0.5.17 only: the EAGLE draft factory, which reads the prefill backend's field itself
    ``wrapper``     puts the model's own attention (here: the sparse layers) around the dense backend
    ``build``       creates a runner's attention backend, the wrapper included
    """
    targets = {
        "arguments": f"{_PIPELINE}:run_resolution_pipeline"
        if exists(_PIPELINE)
        else "sglang.srt.server_args:ServerArgs.__post_init__",
        "wrapper": f"{_REGISTRY}:attn_backend_wrapper",
        "build": f"{_SETUP}:_build_resolved_backend",
    }
    if exists("sglang.srt.runtime_context:attention_backends"):
        targets["pair"] = "sglang.srt.runtime_context:attention_backends"
    else:
        targets["pair"] = "sglang.srt.server_args:ServerArgs.get_attention_backends"
        targets["draft"] = "sglang.srt.speculative.draft_utils:DraftBackendFactory._create_backend"
    return targets


_HOOK_PARAMETERS = {
    f"{_PIPELINE}:run_resolution_pipeline": ["server_args"],
    "sglang.srt.server_args:ServerArgs.__post_init__": ["self"],
    "sglang.srt.runtime_context:attention_backends": [],
    "sglang.srt.server_args:ServerArgs.get_attention_backends": ["self"],
    "sglang.srt.speculative.draft_utils:DraftBackendFactory._create_backend": [
        "self",
        "backend_name",
        "backend_map",
        "error_template",
    ],
    f"{_REGISTRY}:attn_backend_wrapper": ["runner", "full_attn_backend"],
    f"{_SETUP}:_build_resolved_backend": ["model_runner", "resolved", "init_new_workspace"],
}


def verify_hook_targets() -> list[str]:
    """Problems with the functions that get hooked; cheap, run in every process that loads the plugin."""
    problems = []
    for target in hook_targets().values():
        problems += _signature_problems(target, _HOOK_PARAMETERS[target])
    for target in (
        "sglang.srt.server_args:ATTENTION_BACKEND_CHOICES",
        f"{_REGISTRY}:register_attention_backend",
        "sglang.srt.plugins.hook_registry:HookRegistry.register",
    ):
        problems += _missing(target)
    return problems


def verify_seams() -> list[str]:
    """Everything PageWeaver needs of SGLang that is missing or changed, in words; empty when all is well.

    Imports SGLang's sparse attention (Triton included), so it takes seconds in a fresh process. Used when a server
    is asked for PageWeaver, when the backend is created, and by ``pageweaver doctor``.
    """
    if sglang_version() == "not installed":
        return ["SGLang is not installed"]
    problems = verify_hook_targets()
    if exists(_PIPELINE):
        problems += _signature_problems(
            "sglang.srt.arg_groups.overrides:declare_resolution", ["server_args", "source", "fields"]
        )
    problems += _missing("sglang.srt.configs.model_config:is_minimax_sparse")
    problems += _signature_problems(
        f"{_SPARSE_BACKEND}:MiniMaxHybridAttnBackend.__init__",
        ["self", "dense_backend", "sparse_backend", "sparse_layer_ids"],
    )
    problems += _signature_problems(f"{_SPARSE_BACKEND}:MiniMaxSparseAttnBackend.__init__", ["self", "runner"])
    problems += _signature_problems(
        f"{_SPARSE_BACKEND}:MiniMaxSparseAttnBackend.forward_extend",
        ["self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "idx_q", "idx_k", "idx_v"],
    )
    return problems + _step3_problems()


def _step3_problems() -> list[str]:
    target = f"{STEP3_MODULE}:{STEP3_NAME}"
    try:
        found = set(_parameters(target))
        caller = inspect.unwrap(resolve(f"{STEP3_MODULE}:{STEP3_CALLER}"))
    except (ImportError, AttributeError) as error:
        return [f"{target} is missing ({error})"]
    problems = []
    if missing := sorted(STEP3_PARAMETERS - found):
        problems.append(f"{target} lacks the parameters {', '.join(missing)}")
    # An unknown parameter may change what is computed (a window, say), so it counts as a changed seam.
    if unknown := sorted(found - STEP3_PARAMETERS - STEP3_OPTIONAL_PARAMETERS):
        problems.append(f"{target} has the unknown parameters {', '.join(unknown)}")
    if STEP3_NAME not in caller.__code__.co_names:
        problems.append(f"{STEP3_MODULE}:{STEP3_CALLER} does not call {STEP3_NAME} by that name")
    return problems


def _missing(target: str) -> list[str]:
    try:
        resolve(target)
    except (ImportError, AttributeError) as error:
        return [f"{target} is missing ({error})"]
    return []


def _signature_problems(target: str, expected: list[str]) -> list[str]:
    """One problem when ``target`` is missing, lacks an expected parameter, or demands one that is not expected."""
    if missing := _missing(target):
        return missing
    signature = inspect.signature(inspect.unwrap(resolve(target))).parameters
    demanded = [
        name
        for name, parameter in signature.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if [name for name in expected if name not in signature] or [name for name in demanded if name not in expected]:
        return [f"{target} has the parameters ({', '.join(signature)}), expected ({', '.join(expected)})"]
    return []


# Hooks ---------------------------------------------------------------------------------------------------------------


def add_hook(target: str, hook: Callable[..., Any]) -> None:
    """Register ``hook(original, *args, **kwargs)`` around ``target``; SGLang applies it after loading all plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target.replace(":", "."), hook, HookType.AROUND)


def hook_is_live(target: str, hook: Callable[..., Any]) -> bool:
    """Whether ``target`` is wrapped by ``hook`` now. SGLang applies hooks by closures that keep ``__wrapped__``."""
    try:
        found = resolve(target)
    except (ImportError, AttributeError):
        return False
    return any(
        cell.cell_contents is hook
        for layer in _layers(found)
        for cell in (getattr(layer, "__closure__", None) or ())
        if _filled(cell)
    )


def other_plugins(target: str) -> list[str]:
    """Plugins that have a hook on ``target`` beside PageWeaver, as ``name (distribution)``."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    # SGLang offers no question for this; without its list nobody is named, and nothing else changes.
    entries = getattr(HookRegistry, "_hooks", {}).get(target.replace(":", "."), ())
    sources = [entry[2] for entry in entries if entry[1].__module__.partition(".")[0] != __package__.partition(".")[0]]
    return [
        "a plugin that SGLang does not name" if source is None else f"{source.plugin_name} ({source.dist_name})"
        for source in sources
    ]


def beside(target: str) -> str:
    """Words that name the other plugins with a hook on ``target``, to follow a problem; empty where there are none."""
    others = other_plugins(target)
    return f" (also hooked by: {', '.join(others)}; SGLANG_PLUGINS={NAME} keeps other plugins out)" if others else ""


def _layers(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


# Server arguments ----------------------------------------------------------------------------------------------------


def get_fields(server_args: Any, *names: str) -> tuple[Any, ...]:
    """The values of server arguments as resolved so far: declarations before fields."""
    if exists(_PIPELINE):
        from sglang.srt.arg_groups.overrides import resolving_view

        server_args = resolving_view(server_args)
    return tuple(getattr(server_args, name) for name in names)


def set_fields(server_args: Any, **fields: Any) -> None:
    """Decide server arguments: by declaration since 0.5.19, by assignment before."""
    if exists(_PIPELINE):
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(server_args, NAME, **fields)
        return
    for name, value in fields.items():
        # Past SGLang's own guard, which seals the fields at the end of __post_init__.
        object.__setattr__(server_args, name, value)


def captures_sparse_attention(prefill_graph: str) -> bool:
    """Whether this SGLang's prefill CUDA graph of that kind holds the sparse layers' attention, with capture's lengths.

    ``full`` does in every version: its kernels get the lengths that the host knew at capture as plain numbers, and
    since 0.5.20 ``cu_seqlens`` too is made once, before the capture. ``breakable`` did before 0.5.22, as a batch of as
    few requests as the tokens take.
    """
    if prefill_graph == "full":
        return True
    attention = "sglang.srt.layers.radix_attention"
    runs_between_pieces = (
        f"{attention}:breakable_unified_sparse_attention_with_output",  # 0.5.22
        f"{attention}:RadixAttention._eager_attention",  # since 0.5.23
    )
    return prefill_graph == "breakable" and not any(map(exists, runs_between_pieces))


def hf_config_of(server_args: Any) -> Any | None:
    """The model's Hugging Face configuration, or None for the placeholder models that have none."""
    if str(get_fields(server_args, "model_path")[0]).lower() in ("none", "dummy"):
        return None
    if exists("sglang.srt.arg_groups.overrides:model_config_of"):
        from sglang.srt.arg_groups.overrides import model_config_of

        return model_config_of(server_args).hf_config
    return server_args.get_model_config().hf_config


def ranks(runner: Any) -> dict[str, str]:
    """This process's place in the server, as labels of metrics; empty where SGLang does not say."""
    # The runner's own state where it has one (0.5.17), else the process's.
    source = getattr(runner, "ps", None)
    if source is None:
        from sglang.srt.runtime_context import get_parallel

        source = get_parallel()
    labels = {}
    for name in ("tp_rank", "pp_rank", "dp_rank"):
        try:
            value = getattr(source, name)
        except Exception:  # what SGLang raises for a rank it does not know differs by version
            value = None
        labels[name] = "" if value is None else str(value)
    return labels


def query_heads(runner: Any) -> int:
    """Query heads of this rank."""
    from sglang.srt.runtime_context import get_parallel

    try:
        ranks_of_attention = get_parallel().attn_tp_size
    except Exception:  # what SGLang raises where nothing is distributed differs by version
        ranks_of_attention = 1
    return runner.model_config.num_attention_heads // ranks_of_attention


def published_backends() -> tuple[str | None, str | None, str | None]:
    """(attention, prefill, decode) backend names in the configuration that this process serves; Nones before that."""
    from sglang.srt.runtime_context import get_exec

    try:
        kernel = get_exec().kernel
    except ValueError:  # nothing published in this process yet
        return None, None, None
    return kernel.attention_backend, kernel.prefill_attention_backend, kernel.decode_attention_backend

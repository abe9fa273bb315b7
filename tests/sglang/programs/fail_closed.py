"""Break one thing in SGLang before the plugin loads, then start with another backend and with PageWeaver.

Reports for every entry of BREAKS what was built, or the error. Each runs in a fork: SGLang is imported once.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
import pickle
import subprocess
import sys
import types

import fake_runner
import sglang.srt.layers.attention.attention_registry as attention_registry
import sglang.srt.layers.attention.minimax_sparse_backend as minimax_sparse_backend
import sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse as minimax_sparse
import sglang.srt.plugins
import sglang.srt.server_args
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

import pageweaver_sglang.plugin
from pageweaver_sglang.plugin import compat


def change_step3() -> None:
    original = minimax_sparse.flash_prefill_with_gqa_share_sparse
    names = ", ".join(inspect.signature(original).parameters)
    scope = {"original": original}
    exec(f"def changed({names}, sliding_window=None): return original({names})", scope)
    minimax_sparse.flash_prefill_with_gqa_share_sparse = scope["changed"]


def rename_step3() -> None:
    minimax_sparse.renamed = minimax_sparse.flash_prefill_with_gqa_share_sparse
    del minimax_sparse.flash_prefill_with_gqa_share_sparse


def change_forward_extend() -> None:
    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, **kwargs):
        raise AssertionError("a backend whose forward_extend has changed must not serve")

    minimax_sparse_backend.MiniMaxSparseAttnBackend.forward_extend = forward_extend


def change_wrapper() -> None:
    original = attention_registry.attn_backend_wrapper
    attention_registry.attn_backend_wrapper = lambda model_runner, dense: original(model_runner, dense)


def rename_registration() -> None:
    attention_registry.register = attention_registry.register_attention_backend
    del attention_registry.register_attention_backend


def hide_sparse_backend() -> None:
    """As in an SGLang without MiniMax-M3."""
    for name in list(sys.modules):
        if "minimax_sparse" in name:
            sys.modules[name] = None


def lose_hooks(*parts: str) -> None:
    """SGLang logs and swallows what goes wrong while it applies a hook."""
    apply = HookRegistry._apply_target.__func__

    def failing(cls, target, hooks):
        if not parts or any(part in target for part in parts):
            raise RuntimeError(f"{target} cannot be hooked")
        apply(cls, target, hooks)

    HookRegistry._apply_target = classmethod(failing)


def second_plugin(part: str, hook, hook_type=HookType.AROUND) -> None:
    """Another plugin's hook, loaded after PageWeaver, on PageWeaver's hook target whose name holds ``part``."""
    apply = HookRegistry.apply_hooks

    def register_and_apply():
        step3 = f"{compat.STEP3_MODULE}:{compat.STEP3_NAME}"
        (target,) = (target for target in (*compat.hook_targets().values(), step3) if part in target)
        HookRegistry.register(target.replace(":", "."), hook, hook_type, source=HookSource("rival", "rival-dist"))
        apply()

    HookRegistry.apply_hooks = register_and_apply


def pass_through(original, *args, **kwargs):
    return original(*args, **kwargs)


def bypass(original, *args, **kwargs):
    """Call SGLang's function instead of what lies in between."""
    return inspect.unwrap(original)(*args, **kwargs)


def stand_in_for_hybrid_backend() -> None:
    """SGLang imports its model runner for this one, and with it a web server that the tests' environment lacks."""
    name = "sglang.srt.layers.attention.hybrid_attn_backend"
    if importlib.util.find_spec("uvicorn") is None:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].HybridAttnBackend = None  # its backends are built first, and one of them must refuse


HAS_PIPELINE = importlib.util.find_spec("sglang.srt.arg_groups.pipeline") is not None
BREAKS = {
    "nothing": lambda: None,
    "step3 has a new parameter": change_step3,
    "step3 has another name": rename_step3,
    "forward_extend changed": change_forward_extend,
    "wrapper changed": change_wrapper,
    "backends are registered otherwise": rename_registration,
    "no sparse backend": hide_sparse_backend,
    "no hook applied": lose_hooks,
    "wrapper hook not applied": lambda: lose_hooks("attn_backend_wrapper"),
    "arguments hook not applied": lambda: lose_hooks("run_resolution_pipeline", "__post_init__"),
    "pair hook not applied": lambda: lose_hooks("attention_backends"),
    "build hook not applied": lambda: lose_hooks("_build_resolved_backend"),
    "second plugin passes on": lambda: second_plugin("attn_backend_wrapper", pass_through),
    "second plugin bypasses the wrapper": lambda: second_plugin("attn_backend_wrapper", bypass),
    "second plugin replaces the wrapper": lambda: second_plugin(
        "attn_backend_wrapper", attention_registry.attn_backend_wrapper, HookType.REPLACE
    ),
    "second plugin bypasses the arguments": lambda: second_plugin(
        "run_resolution_pipeline" if HAS_PIPELINE else "__post_init__", bypass
    ),
    "second plugin bypasses the pair": lambda: second_plugin("attention_backends", bypass),
    "second plugin bypasses the build": lambda: second_plugin("_build_resolved_backend", bypass),
    "second plugin hooks step3": lambda: second_plugin("flash_prefill_with_gqa_share_sparse", pass_through),
}


stand_in_for_hybrid_backend()


def start(
    *argv: str, architecture: str = "MiniMaxM3SparseForCausalLM", block: int | None = None, page: int | None = None
) -> dict:
    """What a server with these arguments would serve with, or the error with which it stops.

    ``block`` and ``page`` are other tokens per sparse block and KV page than 128.
    """
    try:
        server_args = fake_runner.resolve("--model-path", "dummy", "--device", "cpu", *argv)
        fake_runner.publish(server_args)
        runner = fake_runner.make_runner(server_args, fake_runner.make_pool(4), architecture=architecture)
        if block is not None:
            runner.model_config.hf_config.sparse_attention_config["sparse_block_size"] = block
        if page is not None:
            runner.token_to_kv_pool.page_size = page
        backend = fake_runner.build_backend(runner)
        return {"backend": type(backend).__name__, "sparse": type(backend.sparse).__name__}
    except Exception as error:
        return {"error": str(error), "type": type(error).__name__}


def start_in_a_process_without_the_plugin(*argv: str) -> dict:
    server_args = fake_runner.resolve("--model-path", "dummy", "--device", "cpu", *argv)
    pickled = os.environ["REPORT"] + ".pickle"
    with open(pickled, "wb") as file:
        pickle.dump(server_args, file)
    subprocess.run([sys.executable, "-W", "ignore", __file__, pickled], check=True)
    with open(pickled + ".json") as file:
        return json.load(file)


def without_the_plugin(pickled: str) -> None:
    with open(pickled, "rb") as file:
        server_args = pickle.load(file)
    fake_runner.resolve = lambda *argv: server_args
    write(pickled + ".json", start())


def write(path: str, result: dict) -> None:
    with open(path, "w") as file:
        json.dump(result, file)


def count_hooks() -> dict[str, int]:
    return {target: len(hooks) for target, hooks in HookRegistry._hooks.items() if hooks}


def starts(broken: str) -> dict:
    native_step3 = minimax_sparse.flash_prefill_with_gqa_share_sparse
    BREAKS[broken]()
    load_plugins()
    report = {"other": start("--attention-backend", "torch_native")}
    report["step3 untouched"] = getattr(minimax_sparse, "flash_prefill_with_gqa_share_sparse", None) is native_step3
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    os.environ["PAGEWEAVER_DENSE_BACKEND"] = "torch_native"
    report["pageweaver"] = start("--attention-backend", "pageweaver")
    report["prefill"] = start("--attention-backend", "torch_native", "--prefill-attention-backend", "pageweaver")
    if broken == "nothing":
        report["hooks"] = count_hooks()
        sglang.srt.plugins._plugins_loaded = False
        load_plugins()
        pageweaver_sglang.plugin.register()
        report["hooks after loading again"] = count_hooks()
        report["choices"] = list(sglang.srt.server_args.ATTENTION_BACKEND_CHOICES)
        version, compat.sglang_version = compat.sglang_version, lambda: "0.6.0"
        report["newer"] = start("--attention-backend", "pageweaver")
        compat.sglang_version = version
        report["block 64"] = start("--attention-backend", "pageweaver", block=64)
        report["page 64"] = start("--attention-backend", "pageweaver", page=64)
        report["llama"] = start("--attention-backend", "pageweaver", architecture="LlamaForCausalLM")
        report["without plugin"] = start_in_a_process_without_the_plugin("--attention-backend", "pageweaver")
    return report


def in_a_fork(broken: str) -> dict:
    path = f"{os.environ['REPORT']}.{broken}"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            write(path, starts(broken))
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, f"{broken} failed"
    with open(path) as file:
        return json.load(file)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        without_the_plugin(sys.argv[1])
    else:
        write(os.environ["REPORT"], {broken: in_a_fork(broken) for broken in BREAKS})

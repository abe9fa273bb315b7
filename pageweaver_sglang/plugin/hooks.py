"""The hooks in SGLang, and the guard behind them.

Every hook passes straight through unless the server was asked for PageWeaver. If one is missing, the name
``pageweaver`` reaches SGLang's table of backends, where :func:`guard` stops the server: SGLang itself would log the
failure and go on with its own attention.

Step 3 itself is *not* hooked here: :mod:`.backend` routes it when PageWeaver's backend is created, so that a process
with any other backend runs SGLang's own function.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from . import NAME, compat

logger = logging.getLogger(__name__)

_installed = False
_verified = False
_wrapped = 0
"""How often :func:`wrap_backend` has run for a runner that is to have PageWeaver."""


def install() -> None:
    """Add the name, its guard and the hooks, once per process. Never raises: see ``register``."""
    global _installed
    if _installed:
        return
    _installed = True
    try:
        # The name first: without it SGLang's parser refuses `--attention-backend pageweaver`, which is safe too.
        choices = compat.resolve("sglang.srt.server_args:ATTENTION_BACKEND_CHOICES")
        if NAME not in choices:
            choices.append(NAME)
        compat.resolve("sglang.srt.layers.attention.attention_registry:register_attention_backend")(NAME)(guard)
        problems = compat.verify_hook_targets()
    except Exception as error:
        problems = [f"{type(error).__name__}: {error}"]
    for role, target in _targets().items():
        if compat.exists(target):
            compat.add_hook(target, HOOKS[role])
    if problems:
        logger.warning("pageweaver: not usable here, other backends are unaffected: %s", "; ".join(problems))
    else:
        logger.info("pageweaver: available as --attention-backend %s (SGLang %s)", NAME, compat.sglang_version())


def _targets() -> dict[str, str]:
    try:
        return compat.hook_targets()
    except Exception:  # an SGLang that cannot even be looked at; the problem is logged by install
        return {}


def guard(runner: Any) -> Any:
    """What SGLang's table holds under ``pageweaver``. It is reached only where a hook did not act.

    Raises:
        SeamError: always.
    """
    target = _targets().get("pair", "an unknown place")
    past = f"SGLang reached the backend past PageWeaver's hook on {target}{compat.beside(target)}"
    raise compat.SeamError(compat.refusal(missing_hooks() or [past]))


def missing_hooks() -> list[str]:
    """Problems that keep the hooks from acting in this process: changed targets, and hooks that were not applied."""
    problems = compat.verify_seams()
    for role, target in _targets().items():
        if compat.exists(target) and not compat.hook_is_live(target, HOOKS[role]):
            problems.append(f"the hook on {target} was not applied{compat.beside(target)}")
    return problems


def is_active() -> bool:
    """Whether this process serves with PageWeaver."""
    return compat.published_backends()[1] == NAME


def resolve_arguments(original: Callable[..., Any], server_args: Any) -> Any:
    """Around the resolution of the server arguments: dense backend first, PageWeaver's name afterwards."""
    from . import options

    if not options.is_requested(server_args):
        return original(server_args)
    options.before_resolution(server_args)
    result = original(server_args)
    options.after_resolution(server_args)
    return result


def backend_pair(original: Callable[..., Any], *owner: Any) -> tuple[str | None, str | None]:
    """Around "which (prefill, decode) backends?": the dense ones, so that nothing at run time meets a strange name.

    ``owner`` is the server arguments where SGLang asks them (0.5.17), and empty where it asks the process.

    Raises:
        SeamError: a hook that has to act later is not in place, or the arguments were resolved without PageWeaver.
    """
    global _verified
    prefill, decode = original(*owner)
    if prefill != NAME:
        return prefill, decode
    dense = owner[0].attention_backend if owner else compat.published_backends()[0]
    if not _verified:
        if problems := missing_hooks():
            raise compat.SeamError(compat.refusal(problems))
        _verified = True
    if dense == NAME:
        others = compat.beside(_targets()["arguments"])
        raise compat.SeamError(
            compat.refusal([f"the server arguments were resolved without PageWeaver's hook{others}"])
        )
    return dense, decode


def draft_backend(
    original: Callable[..., Any], factory: Any, backend_name: str, backend_map: Any, error_template: str
) -> Any:
    """Around the EAGLE draft factory of 0.5.17, which reads the field ``backend_name`` by itself."""
    if getattr(factory.server_args, backend_name, None) == NAME:
        backend_name = "attention_backend"
    return original(factory, backend_name, backend_map, error_template)


def wrap_backend(original: Callable[..., Any], runner: Any, full_attn_backend: Any) -> Any:
    """Around SGLang's model-specific wrapper: PageWeaver's sparse backend instead of SGLang's.

    A draft model keeps SGLang's own, like everything else of speculative decoding.
    """
    global _wrapped
    if not is_active() or runner.is_draft_worker:
        return original(runner, full_attn_backend)
    from .backend import build

    _wrapped += 1
    for target in (_targets()["wrapper"], f"{compat.STEP3_MODULE}:{compat.STEP3_NAME}"):
        if others := compat.other_plugins(target):
            logger.warning(
                "pageweaver: %s is hooked by %s too, and PageWeaver takes its place: theirs may not act",
                target,
                ", ".join(others),
            )
    return build(runner, full_attn_backend)


def build_backend(original: Callable[..., Any], **arguments: Any) -> Any:
    """Around the creation of a runner's backend: did :func:`wrap_backend` have its say?

    Another plugin's hook around the same wrapper can keep it from being called, in silence.

    Raises:
        SeamError: it was not called, and the server was asked for PageWeaver.
    """
    before = _wrapped
    backend = original(**arguments)
    if is_active() and not arguments["model_runner"].is_draft_worker and _wrapped == before:
        target = _targets()["wrapper"]
        problem = f"the backend was created without PageWeaver's hook on {target}{compat.beside(target)}"
        raise compat.SeamError(compat.refusal([problem]))
    return backend


HOOKS: dict[str, Callable[..., Any]] = {
    "arguments": resolve_arguments,
    "pair": backend_pair,
    "draft": draft_backend,
    "wrapper": wrap_backend,
    "build": build_backend,
}

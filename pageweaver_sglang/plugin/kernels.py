"""Getting the CUDA kernels ready while the server starts."""

from __future__ import annotations

import logging

import torch

from pageweaver_sglang.config import Config
from pageweaver_sglang.cuda import loader
from pageweaver_sglang.cuda.support import ANY_KIND, CallKind, engine_on, gpu_problem

from . import NAME
from .options import BackendError

logger = logging.getLogger(__name__)


def settings_on(config: Config, device: torch.device, kind: CallKind = ANY_KIND) -> Config:
    """The settings with the engine that serves on this device; unchanged where PageWeaver's kernels don't.

    Args:
        config: the settings.
        device: where the KV pool lies.
        kind: of the calls on this pool; what is not known is not looked at.
    """
    if config.mode == "native" or device.type != "cuda":
        return config
    engine = engine_on(config.engine, torch.cuda.get_device_capability(device), kind)
    if engine in (None, config.engine):
        return config
    if kind != ANY_KIND:
        logger.info("pageweaver: engine %s serves instead of %s: %s", engine, config.engine, kind)
    return config.model_copy(update={"engine": engine})


def prepare(config: Config, device: torch.device) -> str:
    """Compile and load the kernels where they will run, so that no request waits for it.

    Returns:
        Words for the STATUS line.

    Raises:
        BackendError: the kernels are needed and cannot be built; the message says how to go on.
    """
    if config.mode == "native":
        return "not used"
    if device.type != "cuda":
        return f"none (reference engine on {device.type})"
    capability = torch.cuda.get_device_capability(device)
    if problem := gpu_problem(config.engine, capability):
        return f"none (the GPU {problem}: every call goes to SGLang's Step 3)"
    architecture = loader.architecture_of(capability)
    was_built = loader.is_built(architecture)
    try:
        loader.load(architecture)
    except loader.KernelBuildError as error:
        raise BackendError(
            f"--attention-backend {NAME}: {error}\n"
            "To serve with SGLang's own Step 3 meanwhile, set PAGEWEAVER_MODE=native."
        ) from error
    return "loaded" if was_built else "built and loaded"

"""A workload's inputs on the GPU, for the scripts here that time or profile kernels."""

from __future__ import annotations

import argparse
import zipfile

import torch

import pageweaver_sglang as pw
from pageweaver_sglang.bench.inputs import Step3Inputs, make_inputs


def inputs_on_gpu(parser: argparse.ArgumentParser, file: str) -> Step3Inputs:
    """Random Q, K and V for the picks of a .npz file; ends the script with a sentence where that can't be."""
    try:
        workload = pw.load_workload(file)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        parser.error(f"{file}: {error}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, and PyTorch sees none")
    return make_inputs(workload, "cuda", seed=1)

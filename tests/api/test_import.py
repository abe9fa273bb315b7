"""Importing the package, and using it on CPU tensors, loads no SGLang and no CUDA code and starts no compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import pageweaver_sglang as pw
bare = sorted(sys.modules)
import torch
{use}
print(json.dumps([bare, sorted(sys.modules), torch.cuda.is_initialized()]))
"""
USE = """
for name in pw.__all__:
    getattr(pw, name)
from tests.generators import make_case
case = make_case("tail")
pw.sparse_prefill(*case.args(), config=pw.load_config("paper", env={}))
from pageweaver_sglang.cuda import support
support.unsupported_reason(*case.args()[:4], page_size=128)
"""
FOREIGN = {"sglang", "tvm_ffi", "triton", "sgl_kernel", "flashinfer"}


@pytest.mark.parametrize("use", ["", USE], ids=["import", "use"])
def test_import_is_clean(tmp_path, use):
    ran = tmp_path / "nvcc-ran"
    compiler = tmp_path / "nvcc"
    compiler.write_text(f"#!/bin/sh\ntouch {ran}\nexit 1\n")
    compiler.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PAGEWEAVER_")}
    env |= {"PATH": f"{tmp_path}{os.pathsep}{env['PATH']}", "PAGEWEAVER_NVCC": str(compiler)}
    env |= {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PAGEWEAVER_CACHE_DIR": str(tmp_path / "c"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{use}", use)], env=env, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    bare, after, cuda = json.loads(done.stdout)
    assert not {name.split(".")[0] for name in bare} & (FOREIGN | {"torch"}), "names are resolved on first use"
    used = {name.split(".")[0] for name in after} & FOREIGN
    # torch itself looks for Triton.
    assert used <= {"triton"}
    assert not cuda
    assert not {
        name for name in after if name.startswith(("pageweaver_sglang.cuda.ops", "pageweaver_sglang.cuda.loader"))
    }
    assert not ran.exists()
    assert not (tmp_path / "c").exists()


def test_public_names():
    import pageweaver_sglang as pw

    for name in pw.__all__:
        assert getattr(pw, name) is not None
    assert set(pw.__all__) <= set(dir(pw))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pw.nothing

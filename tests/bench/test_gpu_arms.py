"""Every arm of the benchmark on a Hopper GPU: its output against float64, and a CUDA Graph of its call."""

from functools import cache

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang.bench.catalogue import arm_names, catalogue
from pageweaver_sglang.bench.compare import unusable_gpu
from pageweaver_sglang.bench.fidelity import check_arms, compare_rows
from pageweaver_sglang.bench.inputs import CallSize
from pageweaver_sglang.bench.orders import find_orders
from pageweaver_sglang.bench.protocol import ArmUnavailable, capture
from pageweaver_sglang.bench.recorded import heads_of, inputs_of
from pageweaver_sglang.bench.workloads import find_workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(unusable_gpu() is not None, reason=str(unusable_gpu()))]

OURS = ("union", "pageweaver", "auto", "offline", "page-pair", "portable")


# File, and query heads per KV head; None: what the file has, or 16.
FILES = [("packed", None), ("packed", 8), ("packed", 2), ("m3_tiny_layer", None)]


@cache
def loaded(file):
    workload = pw.load_workload(find_workload(file))
    return workload, find_orders(workload)


def arms_of(file, heads=None):
    workload, orders = loaded(file)
    return workload, {entry.arm.name: entry.arm for entry in catalogue(orders, CallSize(heads_of(workload, heads)))}


@cache
def checked(file, heads):
    """Every arm against one float64 reference, which takes longer than the arms."""
    workload, arms = arms_of(file, heads)
    return check_arms(workload, list(arms.values()), rows=256, seed=0, heads_per_kv_head=heads)


@pytest.mark.parametrize("name", arm_names())
@pytest.mark.parametrize(("file", "heads"), FILES)
def test_arm_is_right(name, file, heads):
    found, reasons = checked(file, heads)
    if name not in found and not name.startswith(OURS):
        pytest.skip(reasons[name])
    assert name not in reasons, reasons[name]
    assert found[name]["random"]["cosine"] > 0.99


@pytest.mark.parametrize("name", arm_names())
def test_replay_reads_the_buffers_anew(name):
    """A graph captured on one set gives another set's output once that set's tensors are copied into its buffers."""
    workload, arms = arms_of("packed")
    arm = arms[name]
    inputs, other = inputs_of(workload, "cuda"), inputs_of(workload, "cuda", seed=5)
    try:
        arm.prepare([inputs])
    except ArmUnavailable as reason:
        if name.startswith(OURS):
            raise
        pytest.skip(str(reason))
    outputs = []
    call = arm.call
    arm.call = lambda index: outputs.append(call(index)) or outputs[-1]
    replay = capture(arm, 1)[0]
    for field in ("q", "k_cache", "v_cache"):
        # An arm that needs another dtype has made its own copies.
        for changed in {id(s): s for s in (inputs, *getattr(arm, "sets", []))}.values():
            getattr(changed, field).copy_(getattr(other, field))
    replay()
    torch.cuda.synchronize()
    replayed, eager = outputs[-1].clone(), call(0)
    used = int(workload.cu_seqlens[-1])
    assert compare_rows(replayed[:used], eager[:used])["nrms"] < 1e-3
    arm.release()

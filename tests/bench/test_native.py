"""How SGLang's own Step 3 is tuned, with a stand-in for its kernel that tunes as Triton does: on its first call."""

import types

import pytest
import torch

from pageweaver_sglang.bench import arms
from pageweaver_sglang.bench.inputs import make_inputs
from pageweaver_sglang.bench.peers import native_short


@pytest.fixture
def tuned_on(monkeypatch):
    """Query counts that the kernel tuned on, in order; ``used`` gets the choice that each call ran with."""
    kernel = types.SimpleNamespace(cache={}, cache_results=True, best_config=None)
    seen = types.SimpleNamespace(tunings=[], used=[], kernel=kernel)

    def step3(*, q, **others):
        if "key" not in kernel.cache:
            seen.tunings.append(len(q))
            kernel.cache["key"] = f"chosen on {len(q)}"
        kernel.best_config = kernel.cache["key"]
        seen.used.append(kernel.best_config)
        return q

    for module in (arms, native_short):
        monkeypatch.setattr(module, "native_step3", lambda: (step3, kernel))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return seen


def test_tuned_on_the_measured_size_once_per_size(tuned_on, small_workload):
    arm = arms.NativeArm()
    tuned_on.kernel.cache["key"] = "a server's choice"
    sets = [make_inputs(small_workload, "cpu", seed=seed) for seed in range(2)]
    for given in (sets[:1], sets):
        arm.prepare(given)
        arm.release()
    assert tuned_on.tunings == [111]
    assert arm.notes() == {"tuned": "chosen on 111"}
    assert not tuned_on.kernel.cache_results
    arm.prepare([native_short.shorten(sets[0], 60)])
    assert tuned_on.tunings == [111, 60]
    # Other heads are another size, as one process measures workloads of several.
    for heads, tunings in ((8, 3), (8, 3), (4, 4)):
        arm.prepare([make_inputs(small_workload, "cpu", heads_per_kv_head=heads)])
        assert len(tuned_on.tunings) == tunings


def test_the_short_choice_stays_apart(tuned_on, small_workload):
    sets = [make_inputs(small_workload, "cpu")]
    native, short = arms.NativeArm(), native_short.NativeShortArm()
    for _ in range(2):  # checked, then timed
        native.prepare(sets)
        short.prepare(sets)
        tuned_on.used.clear()
        native.call(0)
        short.call(0)
        native.call(0)
        assert tuned_on.used == ["chosen on 111", "chosen on 90", "chosen on 111"]
        native.release()
        short.release()
    assert tuned_on.tunings == [111, 90]
    assert short.notes() == {"tuned": "chosen on 90"}

"""FlashInfer's XQA (a stand-in) for calls that the kernels don't cover: at a server's start, per call, in SGLang."""

from __future__ import annotations

import logging
import re
import sys

import pytest
import torch
from test_step3 import TOKENS, Native, make_call

from pageweaver_sglang.config import Config
from pageweaver_sglang.flashinfer import xqa
from pageweaver_sglang.plugin import fallback, step3
from pageweaver_sglang.plugin.options import BackendError
from tests.fake_xqa import modules, xqa_batch_decode_with_kv_cache

REASON = "k_cache must be float8_e4m3fn, got bfloat16"
SHAPE = fallback.Shape(torch.bfloat16, torch.bfloat16, 128, 16)
ASKED = Config(fallback_engine="flashinfer-xqa")


@pytest.fixture(autouse=True)
def kernels_take_fp8_only(monkeypatch):
    """As on a GPU, where the kernels take no BF16 cache; the CPU's reference engine takes anything."""

    def uncovered(self, call):
        return None if call["q"].shape[0] == 0 or call["k_cache"].dtype == torch.float8_e4m3fn else REASON

    monkeypatch.setattr(step3.Step3, "_uncovered", uncovered)


def make(function=xqa_batch_decode_with_kv_cache, compiled=SHAPE, **settings):
    serves = fallback.XqaFallback(function, pool_page_size=128, compiled=compiled)
    return step3.Step3(Config(**{"mode": "pageweaver"} | settings), pool_page_size=128, fallback=serves)


def refused(**call):
    pytest.fail("SGLang's own Step 3 was asked")


def test_serves_what_the_kernels_do_not_cover_and_counts_it_apart(caplog):
    caplog.set_level(logging.INFO)
    served, call = make(), make_call()
    for layer in (1, 2):
        out = served(refused, layer, call)
        torch.testing.assert_close(out, Native()(**call), rtol=1e-2, atol=1e-3)
    fp8 = {name: call[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    served(refused, 1, make_call(**fp8))
    stats = served.stats
    assert stats.calls_by_arm == {"flashinfer-xqa": 2, "pageweaver": 1}
    assert stats.tokens_by_arm == {"flashinfer-xqa": 2 * TOKENS, "pageweaver": TOKENS}
    assert stats.calls_by_layer == {1: 1}, "of PageWeaver's own kernels"
    assert not stats.fallbacks_by_reason
    assert caplog.text.count(f"pageweaver: flashinfer-xqa serves calls with: {REASON}") == 1
    assert stats.summary() == "pageweaver calls: {1: 1} fallbacks: {} flashinfer-xqa calls: 2"


@pytest.mark.parametrize("scales", [{}, {"sm_scale": 0.02, "k_scale": 0.5, "v_scale": torch.tensor([3.0])}])
def test_other_lengths_and_scales(scales):
    lengths = {name: make_call()[name].to(torch.int64) for name in ("cu_seqlens", "seq_lens", "prefix_lens")}
    call = make_call(**scales, **lengths)
    torch.testing.assert_close(make()(refused, 1, call), Native()(**call), rtol=1e-2, atol=2e-3)


def test_a_call_without_tokens_asks_nobody():
    call = make_call()
    empty = {"q": call["q"][:0], "topk_idx": call["topk_idx"][:, :0]}
    out = make(function=refused)(refused, 1, make_call(**empty, cu_seqlens=torch.zeros(2, dtype=torch.int32)))
    assert out.shape == (0, 32, 128)


@pytest.mark.parametrize(
    ("changes", "reason", "also"),
    [
        ({"sink": torch.zeros(32, 128)}, "attention sink", None),
        ({"loc_mapping": torch.zeros(384)}, "HiSparse slot remapping (loc_mapping)", None),
        ({"q_scale": 0.5}, "q_scale (FP8 queries)", None),
        ({"block_size_q": 16}, "block_size_q 16 (only 1: every query picks its own pages)", None),
        ({"sliding_window": 64}, "unknown argument sliding_window", None),
        ({"sm_scale": -1.0}, REASON, "sm_scale must be at least 1e-06, got -1.0"),
        (
            {"q": make_call()["q"].to(torch.float16)},
            REASON,
            "k_cache must be float8_e4m3fn or, like q, float16, got bfloat16",
        ),
        (
            {"q": make_call()["q"][:, :16]},
            REASON,
            "not the dtypes and heads of the KV pool, for which its kernel was compiled",
        ),
    ],
)
def test_what_xqa_does_not_cover_is_sglangs(changes, reason, also, caplog):
    served = make(function=refused)
    for _ in range(2):
        assert served(lambda **call: "native", 1, make_call(**changes)) == "native"
    assert served.stats.calls_by_arm == {"native": 2}
    assert served.stats.fallbacks_by_reason == {reason: 2}
    assert caplog.text.count(f"SGLang's own Step 3 serves calls with: {reason}") == 1
    said = f"flashinfer-xqa does not cover calls with: {reason} ({also})"
    assert caplog.text.count(said) == (also is not None)


def test_never_in_mode_native_and_never_while_switched_off():
    served = make(function=refused, mode="native")
    assert served(lambda **call: "native", 1, make_call()) == "native"
    served = make(function=refused)
    served.switch.turn(False)
    assert served(lambda **call: "native", 1, make_call()) == "native"
    assert served.stats.fallbacks_by_reason == {"switched off": 1}


def test_an_error_costs_no_request_and_leaves_everything_to_sglang(caplog):
    def broken(**call):
        raise RuntimeError("CUDA error: no kernel image")

    served, native = make(function=broken), Native()
    for _ in range(2):
        assert torch.equal(served(native, 1, make_call()), Native()(**make_call()))
    assert served.switch.reason == "disabled after an error"
    assert served.stats.calls_by_arm == {"native": 2}
    assert served.stats.fallbacks_by_reason == {"error: RuntimeError": 1, "disabled after an error": 1}
    assert caplog.text.count("DISABLED in process") == 1
    with pytest.raises(RuntimeError, match="no kernel image"):
        make(function=broken, on_error="raise")(native, 1, make_call())


def test_its_calls_are_verified_and_counted_when_captured(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    served = make(verify_every=1)
    served(Native(error=0.02), 1, make_call())
    assert served.stats.last_verification.nrms == pytest.approx(0.02 / 1.02, rel=0.1)
    monkeypatch.setattr(step3, "_capturing", lambda tensor: True)
    served(refused, 1, make_call())
    assert served.stats.captured_calls == 1


# At a server's start -------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """FlashInfer is installed, and the device is one it serves on."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(xqa, "device_reason", lambda device: None)
    return sys.modules["flashinfer.decode"]


def prepare(config=ASKED, q_heads=32, pool_page_size=128, **changes):
    call = make_call(**changes)
    options = {"q_heads": q_heads, "q_dtype": torch.bfloat16, "pool_page_size": pool_page_size, "page_size": 128}
    return fallback.prepare(config, call["k_cache"], call["v_cache"], **options)


def test_prepared(installed, caplog):
    serves, words = prepare()
    assert words == "flashinfer-xqa"
    assert serves.unsupported_reason(make_call()) is None
    assert not caplog.records
    assert prepare(q_heads=2, pool_page_size=64)[1] == "flashinfer-xqa"


def test_high_precision_is_not_given_up_for_it(installed):
    """XQA rounds queries and weights to FP8 where the cache is FP8, and computes in BF16 where it is BF16."""
    high = Config(fallback_engine="flashinfer-xqa", precision="high")
    assert prepare(high)[1] == "flashinfer-xqa"
    call = make_call()
    caches = {name: call[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    assert prepare(high, **caches) == (None, "native (flashinfer-xqa has no precision high for an FP8 cache)")


def test_not_even_imported_where_nobody_asks_for_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    for config in (Config(), Config(mode="native", fallback_engine="flashinfer-xqa")):
        assert prepare(config) == (None, "native")


def test_asked_for_and_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    message = (
        r"^--attention-backend pageweaver: fallback_engine flashinfer-xqa: FlashInfer can't be imported .*; "
        r"install flashinfer-python 0.6.15 to 0.7.4, or set PAGEWEAVER_FALLBACK_ENGINE=native\.$"
    )
    with pytest.raises(BackendError, match=message):
        prepare()


def test_no_compiler(installed, monkeypatch, caplog):
    def compile_it(query, *arguments, **options):
        raise RuntimeError("Could not find nvcc\nand more")

    serves = xqa.load()
    monkeypatch.setattr(xqa, "load", lambda: compile_it)
    assert prepare() == (None, "native (flashinfer-xqa can't serve here)")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "pageweaver: fallback_engine flashinfer-xqa can't serve here, so that SGLang's own Step 3 serves what the "
        "kernels don't cover: RuntimeError: Could not find nvcc"
    )
    assert serves is xqa_batch_decode_with_kv_cache


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"q_heads": 64}, "q must have 1 to 16 query heads per KV head, got 64 for 2"),
        ({"pool_page_size": 1}, "page_size and pool_page_size must be multiples of 16, got 128 and 1"),
    ],
)
def test_a_pool_that_it_does_not_cover(installed, caplog, options, reason):
    assert prepare(**options)[0] is None
    assert reason in caplog.text


def test_another_gpu(installed, monkeypatch, caplog):
    monkeypatch.undo()
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert prepare()[0] is None
    assert "needs a CUDA device, got cpu" in caplog.text


def test_a_kernel_that_answers_wrongly(installed, monkeypatch, caplog):
    def wrong(**call):
        xqa_batch_decode_with_kv_cache(**call).mul_(0.9)

    monkeypatch.setattr(xqa, "load", lambda: wrong)
    assert prepare()[0] is None
    assert "its kernel gave a wrong answer to a first call" in caplog.text


# In SGLang -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome(run_program):
    return run_program("fallback", PAGEWEAVER_DENSE_BACKEND="torch_native", PAGEWEAVER_FALLBACK_ENGINE="flashinfer-xqa")


@pytest.mark.parametrize("case", ["bf16", "tp8", "packed", "two kv heads", "wide top-k", "unsorted", "padded"])
def test_agrees_with_sglangs_step3(outcome, case):
    result = outcome.result[case]
    assert result["arms"] == {"flashinfer-xqa": 1, "native": 1}
    assert result["fallbacks"] == {}
    assert result["nrms"] < 0.005
    assert result["padding is zero"]


def test_a_query_that_picked_nothing_gets_zeros(outcome):
    assert outcome.result["nothing picked"]


def test_the_kernels_come_first(outcome):
    assert outcome.result["covered"] == {"pageweaver": 1}


def test_the_status_line_names_it(outcome):
    lines = [line for line in outcome.output.splitlines() if line.startswith("pageweaver STATUS")]
    assert re.search(r"kernels \S.*, value tiles none, fallback flashinfer-xqa, dense layers", lines[0])


def test_without_flashinfer_the_server_stops(outcome):
    assert "fallback_engine flashinfer-xqa: FlashInfer can't be imported" in outcome.result["not installed"]

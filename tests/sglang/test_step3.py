"""One Step 3 call: who serves it, what is counted and logged. Needs no SGLang: its function is a stand-in here."""

from __future__ import annotations

import inspect
import logging
import types

import pytest
import torch

from pageweaver_sglang import reference
from pageweaver_sglang.auto import model
from pageweaver_sglang.capture.snapshot import HostLengths
from pageweaver_sglang.config import Config
from pageweaver_sglang.plugin import capture, compat, step3
from pageweaver_sglang.plugin.forwards import Forward

TOKENS, KV_HEADS, PREFIX = 6, 2, 200
BATCH = types.SimpleNamespace(extend_prefix_lens_cpu=[PREFIX], extend_seq_lens_cpu=[TOKENS])
LENGTHS = HostLengths((PREFIX,), (TOKENS,))
TENSORS = ("q", "k_cache", "v_cache", "topk_idx", "req_to_token", "slot_ids", "cu_seqlens", "seq_lens", "prefix_lens")


def make_call(**changes) -> dict:
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    call = {
        "q": random(TOKENS, 16 * KV_HEADS, 128),
        "k_cache": random(384, KV_HEADS, 128),
        "v_cache": random(384, KV_HEADS, 128),
        "sink": None,
        "req_to_token": torch.arange(384, dtype=torch.int32)[None],
        "slot_ids": torch.zeros(1, dtype=torch.int64),
        "topk_idx": torch.tensor([[[0, 1, -1]] * TOKENS, [[1, -1, -1]] * TOKENS], dtype=torch.int32),
        "block_size_q": 1,
        "block_size_k": 128,
        "cu_seqlens": torch.tensor([0, TOKENS], dtype=torch.int32),
        "seq_lens": torch.tensor([PREFIX + TOKENS], dtype=torch.int32),
        "prefix_lens": torch.tensor([PREFIX], dtype=torch.int32),
        "max_seqlen_q": TOKENS,
        "sm_scale": None,
        "cu_seqblocks_q": None,
        "max_seqblock_q": None,
        "q_scale": None,
        "k_scale": None,
        "v_scale": None,
        "loc_mapping": None,
    }
    return call | changes


class Native:
    """SGLang's function: the reference with a known error."""

    def __init__(self, error: float = 0.0):
        self.calls, self.error = 0, error

    def __call__(self, **call):
        self.calls += 1
        arguments = [call[name] for name in TENSORS[:6]] + [call[name].to(torch.int32) for name in TENSORS[6:]]
        scales = {name: call[name] for name in ("sm_scale", "k_scale", "v_scale")}
        out = reference.sparse_prefill(*arguments, **scales, page_size=128)
        return out * (1 + self.error)


def make(**settings) -> step3.Step3:
    return step3.Step3(Config(**{"mode": "pageweaver"} | settings), pool_page_size=128)


def test_serves_as_the_reference_does():
    native, served = Native(), make()
    out = served(native, 3, make_call())
    assert native.calls == 0
    assert torch.equal(out, Native()(**make_call()))
    assert served.stats.calls_by_arm == {"pageweaver": 1}
    assert served.stats.calls_by_layer == {3: 1}


@pytest.mark.parametrize("mode", ["pageweaver", "union8"])
def test_counts_by_mode(mode):
    served = make(mode=mode)
    served(Native(), 1, make_call())
    assert served.stats.calls_by_arm == {mode: 1}


def forward_of(prefixes: list[int], chunks: list[int]) -> Forward:
    return Forward(types.SimpleNamespace(extend_prefix_lens_cpu=prefixes, extend_seq_lens_cpu=chunks))


def long_call(tokens: int) -> dict:
    """Queries of four kinds that alternate, 8 pages each: groups of 32 pages, or of 8 once regrouped."""
    kinds = torch.arange(32, dtype=torch.int32).view(4, 8)
    return make_call() | {
        "q": torch.zeros(tokens, 16 * KV_HEADS, 128, dtype=torch.bfloat16),
        "k_cache": torch.zeros(1, KV_HEADS, 128, dtype=torch.float8_e4m3fn).expand(8192, KV_HEADS, 128),
        "v_cache": torch.zeros(1, KV_HEADS, 128, dtype=torch.float8_e4m3fn).expand(8192, KV_HEADS, 128),
        "req_to_token": torch.arange(8192, dtype=torch.int32)[None],
        "topk_idx": kinds.repeat(KV_HEADS, tokens // 4, 1),
        "cu_seqlens": torch.tensor([0, tokens], dtype=torch.int32),
        "seq_lens": torch.tensor([6000 + tokens], dtype=torch.int32),
        "prefix_lens": torch.tensor([6000], dtype=torch.int32),
    }


@pytest.fixture
def without_attention(monkeypatch):
    """The reference engine counts visits, and returns Q: what decisions do not depend on would take long."""
    monkeypatch.setattr(reference, "sparse_prefill", lambda q, *arguments, **options: q)


def test_mode_auto_decides_per_layer_and_context_and_counts_what_was_done(without_attention, caplog):
    caplog.set_level(logging.DEBUG)
    served = make(mode="auto")
    for layer, tokens in ((3, 320), (3, 320), (3, 320), (3, 640), (4, 320), (4, TOKENS)):
        call = make_call() if tokens == TOKENS else long_call(tokens)
        served(Native(), layer, call, forward_of([PREFIX if tokens == TOKENS else 6000], [tokens]))
    # Two calls until the first one counts; three visits a row are too few for 320 queries, and enough for 640.
    assert served.stats.decisions == {"first": 3, "original": 1, "regroup": 1, "small": 1}
    assert served.stats.calls_by_arm == {"pageweaver": 4, "union8": 2}
    assert served.stats.tokens_by_arm == {"pageweaver": 3 * 320 + 640, "union8": 320 + TOKENS}
    assert served.stats.measured_visits == {"original": 640 * 4, "regrouped": 640}
    gain = model.gain_us(2 * 320, 3, window=64, engine="stream")
    assert f"auto: layer 3 tokens 320: original order (original, expected gain {gain:.1f} us)" in caplog.text
    assert "auto: layer 4 tokens 6: original order (small)" in caplog.text
    assert "decisions: {'first': 3" in served.stats.summary()


def test_mode_auto_without_lengths_of_this_batch(without_attention):
    """None, or those of another number of requests (padding): one history for all contexts."""
    served, call = make(mode="auto"), long_call(320)
    for forward in (None, forward_of([1280, 0], [320, 0]), None):
        served(Native(), 3, call, forward)
    assert served.stats.decisions == {"first": 2, "original": 1}


def test_mode_auto_on_an_idle_rank():
    served = make(mode="auto")
    call = make_call()
    empty = {"q": call["q"][:0], "topk_idx": call["topk_idx"][:, :0], "cu_seqlens": torch.zeros(2, dtype=torch.int32)}
    assert served(Native(), 1, call | empty).shape == (0, 32, 128)
    assert served.stats.calls_by_arm == {"union8": 1}
    assert not served.stats.decisions


def test_mode_auto_hands_back_like_the_others():
    native, served = Native(), make(mode="auto")
    served(native, 1, make_call(q_scale=0.5))
    assert served.stats.calls_by_arm == {"native": 1}
    assert not served.stats.decisions


def test_an_error_in_a_decision_costs_no_request(monkeypatch):
    native, served = Native(), make(mode="auto")
    monkeypatch.setattr("pageweaver_sglang.auto.history.History.decide", lambda *args: 1 / 0)
    for _ in range(2):
        assert torch.equal(served(native, 1, make_call()), Native()(**make_call()))
    assert served.switch.error == "ZeroDivisionError: division by zero"
    assert native.calls == 2


def test_mode_native_is_always_sglangs():
    native, served = Native(), make(mode="native")
    served(native, 1, make_call())
    served(native, 1, make_call(sink=torch.zeros(32)))
    assert native.calls == 2
    assert served.stats.calls_by_arm == {"native": 2}
    assert not served.stats.fallbacks_by_reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sink": torch.zeros(32, 128)}, "attention sink"),
        ({"block_size_q": 16}, "block_size_q 16 (only 1: every query picks its own pages)"),
        ({"loc_mapping": torch.zeros(384, dtype=torch.int64)}, "HiSparse slot remapping (loc_mapping)"),
        ({"q_scale": 0.5}, "q_scale (FP8 queries)"),
        ({"sliding_window": 64}, "unknown argument sliding_window"),
    ],
)
def test_falls_back_per_call_and_logs_once(changes, reason, caplog):
    native, served = Native(), make()
    caplog.set_level(logging.INFO)
    for _ in range(3):
        served(native, 1, make_call(**changes))
    served(native, 1, make_call())
    assert native.calls == 3
    assert served.stats.fallbacks_by_reason == {reason: 3}
    assert served.stats.calls_by_arm == {"native": 3, "pageweaver": 1}
    assert sum(reason in record.getMessage() for record in caplog.records) == 1


def test_an_unused_unknown_argument_is_no_reason():
    served = make()
    served(lambda **call: pytest.fail("fell back"), 1, make_call(sliding_window=None, q_scale=1.0))
    assert served.stats.calls_by_arm == {"pageweaver": 1}


def test_int64_lengths_are_converted():
    lengths = {name: make_call()[name].to(torch.int64) for name in ("cu_seqlens", "seq_lens", "prefix_lens")}
    served = make()
    out = served(lambda **call: pytest.fail("fell back"), 1, make_call(**lengths))
    assert torch.equal(out, Native()(**make_call()))


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float8_e4m3fn, torch.bfloat16)],
)
def test_zero_tokens(dtype, out_dtype):
    call = make_call()
    empty = {
        "q": call["q"][:0].to(dtype),
        "topk_idx": call["topk_idx"][:, :0],
        "cu_seqlens": torch.zeros(2, dtype=torch.int32),
    }
    out = make()(lambda **call: pytest.fail("fell back"), 1, make_call(**empty))
    assert out.shape == (0, 32, 128)
    assert out.dtype == out_dtype


@pytest.mark.parametrize("scale", [0.02, None])
@pytest.mark.parametrize("name", ["sm_scale", "k_scale", "v_scale"])
def test_scales_are_passed_on(name, scale):
    native = Native()
    out = make()(native, 1, make_call(**{name: scale}))
    assert native.calls == 0
    assert torch.equal(out, Native()(**make_call(**{name: scale})))
    assert torch.equal(out, Native()(**make_call())) == (scale is None)


def test_what_the_kernels_are_asked_about(monkeypatch):
    """On a GPU a call that the kernels do not cover is SGLang's; they are asked with this pool's page size."""
    asked = []

    def unsupported_reason(*tensors, **options):
        asked.append((tensors, options))
        return "k_cache is not to its liking"

    monkeypatch.setattr("pageweaver_sglang.cuda.support.unsupported_reason", unsupported_reason)
    monkeypatch.setattr(torch.Tensor, "device", types.SimpleNamespace(type="cuda"))
    served = step3.Step3(Config(), pool_page_size=64)
    call = make_call(sm_scale=0.1, k_scale=0.2)
    assert served(lambda **call: "native", 1, call) == "native"
    ((tensors, options),) = asked
    assert all(a is call[name] for a, name in zip(tensors, ("q", "k_cache", "v_cache", "topk_idx"), strict=True))
    scales = {"sm_scale": 0.1, "k_scale": 0.2}
    assert options == {"page_size": 128, "engine": "stream", "pool_page_size": 64, **scales}
    assert served.stats.fallbacks_by_reason == {"k_cache is not to its liking": 1}


def test_the_settings_reach_sparse_prefill(monkeypatch):
    seen = []
    monkeypatch.setattr(step3, "sparse_prefill", lambda **options: seen.append(options) or options["q"])
    served = make(window=64, guard="none", on_error="raise")
    served(Native(), 1, make_call())
    assert seen[0]["config"] is served.config


def test_verification(caplog):
    caplog.set_level(logging.INFO)
    native, served = Native(error=0.02), make(verify_every=2)
    for layer in (1, 2, 1, 2):
        served(native, layer, make_call())
    assert native.calls == 2
    verify = [record.getMessage() for record in caplog.records if "verify" in record.getMessage()]
    assert len(verify) == 2
    start = f"pageweaver verify: layer 2 call 2 tokens {TOKENS} requests 1 q_heads 32 kv_heads 2 nrms "
    assert verify[0].startswith(start)
    assert served.stats.last_verification.nrms == pytest.approx(0.02 / 1.02, rel=0.05)
    assert served.stats.last_verification.cosine == pytest.approx(1, abs=1e-4)
    assert "pageweaver calls: {1: 2, 2: 2} fallbacks: {}" in caplog.text


def test_verification_leaves_out_rows_behind_the_last_request(caplog):
    """SGLang's function does not write them: they hold what was in memory."""
    caplog.set_level(logging.INFO)

    class Unwritten(Native):
        def __call__(self, **call):
            out = super().__call__(**call)
            out[TOKENS - 2 :] = 1e4
            return out

    served = make(verify_every=1)
    lengths = {"cu_seqlens": torch.tensor([0, TOKENS - 2], dtype=torch.int32)}
    out = served(Unwritten(), 1, make_call(**lengths, seq_lens=torch.tensor([PREFIX + TOKENS - 2], dtype=torch.int32)))
    assert served.stats.last_verification.nrms == 0
    assert not out[TOKENS - 2 :].any()


def test_padding_that_is_not_zero_is_counted(caplog):
    caplog.set_level(logging.INFO)
    served = make(verify_every=2)
    out = torch.zeros(5, 8)
    out[3, 7], out[4, 0], out[0] = float("nan"), 1, 1
    served(Native(), 1, make_call())
    served.check_padding(1, out, [1, 1])
    assert "padding" not in caplog.text, "the call was not one to verify"
    served(Native(), 2, make_call())
    served.check_padding(2, out, [1, 4])
    served.check_padding(2, out, None)
    assert "padding" not in caplog.text, "no row, or no way to know"
    served.check_padding(2, out, [1, 1])
    assert "pageweaver padding: layer 2 rows 3 not zero 2" in caplog.text


def test_no_verification_while_a_graph_is_captured(monkeypatch):
    """It reads the device, which would break the capture."""
    monkeypatch.setattr(step3, "_capturing", lambda tensor: True)
    native, served = Native(), make(verify_every=1)
    served(native, 1, make_call())
    assert native.calls == 0
    assert served.stats.calls_by_arm == {"pageweaver": 1}


def test_compare_leaves_out_rows_that_sglang_has_not_finite():
    expected = torch.ones(3, 2, 4)
    out = expected.clone()
    expected[1, 0, 0] = float("nan")
    assert step3.compare(out, expected) == step3.Verification(0.0, 0.0, 1.0, 1)
    out[0, 0, 0] = float("nan")
    assert step3.compare(out, expected).nrms != step3.compare(out, expected).nrms
    assert step3.compare(out[1:2], expected[1:2]).skipped_rows == 1


def test_compare_of_a_long_chunk_is_what_the_formulas_say():
    """It goes through the tokens in parts; no part may be missing or counted twice."""
    generator = torch.Generator().manual_seed(1)
    expected = torch.randn(2500, 2, 4, generator=generator)
    out = expected + 0.1 * torch.randn(2500, 2, 4, generator=generator)
    out[2499] += 3
    expected[17] = float("inf")
    rows = torch.arange(2500) != 17
    a, b = out[rows].double().flatten(), expected[rows].double().flatten()
    found = step3.compare(out, expected)
    assert found.nrms == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-12)
    assert found.cosine == pytest.approx(float(a @ b / (a.norm() * b.norm())), rel=1e-12)
    assert found.max_error == float((a - b).abs().max())
    assert found.skipped_rows == 1


def test_a_comparison_that_fails_costs_no_request(caplog):
    def out_of_memory(**call):
        raise torch.OutOfMemoryError("no room for a second output")

    served = make(verify_every=1)
    out = served(out_of_memory, 1, make_call())
    assert torch.equal(out, Native()(**make_call()))
    assert "could not be compared" in caplog.text
    assert served.stats.last_verification is None


def test_router_serves_only_while_told_to():
    def flash_prefill_with_gqa_share_sparse(*args, **kwargs):
        return "native"

    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, named) for name in make_call()]
    flash_prefill_with_gqa_share_sparse.__signature__ = inspect.Signature(parameters)
    module = types.SimpleNamespace(**{compat.STEP3_NAME: flash_prefill_with_gqa_share_sparse})
    step3.route(module)
    step3.route(module)
    routed = getattr(module, compat.STEP3_NAME)
    assert routed.__wrapped__ is flash_prefill_with_gqa_share_sparse
    call = make_call()
    assert routed(**call) == "native"
    served = make()
    with step3.serving(served, 5):
        assert torch.equal(routed(**call), Native()(**call))
        assert torch.equal(routed(*call.values()), Native()(**call))
    assert routed(**call) == "native"
    assert routed(*call.values()) == "native"
    assert served.stats.calls_by_layer == {5: 2}


class Recorder:
    """Notes what it is offered."""

    def __init__(self):
        self.offers = []

    def offer(self, *offer):
        self.offers.append(offer)


@pytest.mark.parametrize("mode", ["native", "union8", "pageweaver", "auto"])
def test_every_mode_and_every_fallback_is_offered_to_the_recorder(mode):
    recorder, native = Recorder(), Native()
    served = step3.Step3(Config(mode=mode), pool_page_size=128, recorder=recorder)
    for call in (make_call(), make_call(q_scale=0.5)):
        out = served(native, 7, call, Forward(BATCH))
        layer, offered, result, of = recorder.offers.pop()
        assert (layer, of) == (7, LENGTHS)
        assert offered is call
        assert result is out
    assert recorder.offers == []


def test_the_batchs_lengths_reach_the_recorder():
    def flash_prefill_with_gqa_share_sparse(**call):
        return call["q"]

    module = types.SimpleNamespace(**{compat.STEP3_NAME: flash_prefill_with_gqa_share_sparse})
    step3.route(module)
    recorder = Recorder()
    served = step3.Step3(Config(mode="native"), pool_page_size=128, recorder=recorder)
    with step3.serving(served, 2, Forward(BATCH)):
        getattr(module, compat.STEP3_NAME)(**make_call())
    with step3.serving(served, 3):
        getattr(module, compat.STEP3_NAME)(**make_call())
    assert [(layer, of) for layer, _, _, of in recorder.offers] == [(2, LENGTHS), (3, None)]


def test_lengths_on_the_host():
    batch = types.SimpleNamespace(extend_prefix_lens_cpu=[5, 0], extend_seq_lens_cpu=torch.tensor([2, 3]))
    assert capture.host_lengths(batch) == HostLengths((5, 0), (2, 3))
    assert capture.host_lengths(types.SimpleNamespace(extend_seq_lens_cpu=[1])) is None
    assert capture.host_lengths(types.SimpleNamespace(extend_prefix_lens_cpu=[1], extend_seq_lens_cpu=[1, 2])) is None

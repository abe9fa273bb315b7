"""A server that was asked for PageWeaver serves with it or stops; any other backend starts as without the plugin."""

from __future__ import annotations

import pytest

PAGEWEAVER = {"backend": "MiniMaxHybridAttnBackend", "sparse": "PageWeaverSparseAttnBackend"}
NATIVE = {"backend": "MiniMaxHybridAttnBackend", "sparse": "MiniMaxSparseAttnBackend"}


@pytest.fixture(scope="module")
def outcome(run_program):
    return run_program("fail_closed")


@pytest.fixture
def starts(outcome):
    return outcome.result


@pytest.fixture
def whole(starts):
    return starts["nothing"]


def test_serves_where_nothing_is_broken(whole):
    assert whole["pageweaver"] == PAGEWEAVER
    assert whole["prefill"] == PAGEWEAVER


def test_other_backends_run_sglangs_own_step3(whole):
    assert whole["other"] == NATIVE
    assert whole["step3 untouched"]


def test_a_model_without_sparse_attention_is_refused(whole):
    assert "LlamaForCausalLM" in whole["llama"]["error"]


def test_a_process_without_the_plugin_stops(whole):
    assert "Invalid attention backend: pageweaver" in whole["without plugin"]["error"]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("step3 has a new parameter", ["unknown parameters sliding_window"]),
        ("forward_extend changed", ["MiniMaxSparseAttnBackend.forward_extend"]),
        ("wrapper changed", ["attn_backend_wrapper has the parameters (model_runner, dense)"]),
        ("backends are registered otherwise", ["attention_registry:register_attention_backend is missing"]),
        ("no hook applied", ["attn_backend_wrapper was not applied"]),
        ("wrapper hook not applied", ["attn_backend_wrapper was not applied"]),
        ("arguments hook not applied", ["was not applied"]),
        ("pair hook not applied", ["attention_backends was not applied"]),
        ("build hook not applied", ["_build_resolved_backend was not applied"]),
        ("second plugin bypasses the wrapper", ["created without PageWeaver's hook on", "rival (rival-dist)"]),
        ("second plugin bypasses the pair", ["past PageWeaver's hook on", "attention_backends", "rival (rival-dist)"]),
    ],
)
def test_stops_where_sglang_is_not_as_expected(starts, broken, words):
    result = starts[broken]
    assert result["other"] == NATIVE
    for asked in ("pageweaver", "prefill"):
        error = result[asked]["error"]
        assert [
            word for word in [*words, "Found SGLang 0.5.", "supported: 0.5.17 to 0.5.23"] if word not in error
        ] == []


def test_a_second_plugin_that_resolves_the_arguments_past_pageweaver(starts):
    error = starts["second plugin bypasses the arguments"]["pageweaver"]["error"]
    assert "resolved without PageWeaver's hook (also hooked by: rival (rival-dist); SGLANG_PLUGINS=pageweaver" in error


def test_an_sglang_without_the_models_attention_is_named(starts):
    error = starts["no sparse backend"]["pageweaver"]["error"]
    assert "minimax_sparse_backend:MiniMaxSparseAttnBackend.forward_extend is missing" in error
    assert "Install a supported version, or start the server without --attention-backend pageweaver." in error


def test_a_second_plugin_around_the_last_check_changes_nothing(starts):
    result = starts["second plugin bypasses the build"]
    assert result["pageweaver"] == result["prefill"] == PAGEWEAVER


@pytest.mark.parametrize(
    ("case", "error"),
    [
        (
            "block 64",
            "serves sparse blocks of 128 tokens, and this model's (sparse_block_size in its config.json) have 64",
        ),
        ("page 64", "needs KV pages of 128 tokens, got 64. Set --page-size 128."),
    ],
)
def test_other_sizes_that_the_arguments_did_not_show(whole, case, error):
    assert error in whole[case]["error"]


def test_a_newer_sglang_is_told_to_be_untested(whole, outcome):
    assert whole["newer"] == PAGEWEAVER
    assert "sglang 0.6.0 (untested; tested are 0.5.17 to 0.5.23), torch" in outcome.output


@pytest.mark.parametrize("second", ["passes on", "replaces the wrapper", "hooks step3"])
def test_a_second_plugin_on_the_same_place_is_named(starts, outcome, second):
    result = starts[f"second plugin {second}"]
    assert result["pageweaver"] == result["prefill"] == PAGEWEAVER
    assert result["other"] == NATIVE
    place = "flash_prefill_with_gqa_share_sparse" if second == "hooks step3" else "attn_backend_wrapper"
    assert f"{place} is hooked by rival (rival-dist) too, and PageWeaver takes its place" in outcome.output


def test_loading_the_plugin_again_changes_nothing(whole):
    """SGLang may load plugins in every process, and more than once."""
    assert whole["hooks after loading again"] == whole["hooks"]
    assert max(whole["hooks"].values()) == 1
    assert whole["choices"].count("pageweaver") == 1


def test_a_renamed_step3_is_named(starts):
    result = starts["step3 has another name"]
    assert "flash_prefill_with_gqa_share_sparse is missing" in result["pageweaver"]["error"]
    assert result["other"] == NATIVE

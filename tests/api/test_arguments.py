"""Every public function refuses every bad argument with a message that names the function and the argument."""

from __future__ import annotations

import re

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang.auto.history import Decision
from pageweaver_sglang.auto.readback import Measurement
from tests.generators import make_case

CASE = make_case("packed", seed=0, requests=((5, 300), (0, 7), (9, 0)), padding=3, kv_heads=2)
POOL_PAGES = CASE.k_cache.shape[0] // 128
MARKS = torch.zeros(2, POOL_PAGES, dtype=torch.int32)
TILES = torch.zeros(2, POOL_PAGES, 16384, dtype=torch.uint8)
UNALIGNED_TILES = torch.zeros(TILES.numel() + 1, dtype=torch.uint8)[1:].view(TILES.shape)
TOKENS = 17


def integers(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


CALLS = {
    "regroup": {name: getattr(CASE, name) for name in ("topk_idx", "cu_seqlens", "prefix_lens")},
    "prepare_unions": {
        "topk_idx": CASE.topk_idx,
        "perm": pw.regroup(CASE.topk_idx, CASE.cu_seqlens, CASE.prefix_lens),
        "cu_seqlens": CASE.cu_seqlens,
        "seq_lens": CASE.seq_lens,
        "prefix_lens": CASE.prefix_lens,
    },
    "sparse_prefill": {
        name: getattr(CASE, name)
        for name in (
            *("q", "k_cache", "v_cache", "topk_idx", "req_to_token", "slot_ids"),
            *("cu_seqlens", "seq_lens", "prefix_lens"),
        )
    },
}

TOPK = [
    (None, TypeError, r"int32 \[kv_heads(=2)?, tokens(=17)?, k\], got NoneType None"),
    ([[[1]]], TypeError, "got list"),
    (torch.zeros(2, TOKENS, 16), TypeError, r"int32 .*, got float32 \[2, 17, 16\]"),
    (CASE.topk_idx.long(), TypeError, r"got int64 \[2, 17, 16\]"),
    (CASE.topk_idx[0], ValueError, r"got int32 \[17, 16\]"),
    (CASE.topk_idx[:, :, :0], ValueError, "at least one page per query"),
    (CASE.topk_idx[:0], ValueError, "KV head|kv_heads=2"),
]
CU_SEQLENS = [
    ([0, 17], TypeError, r"int32 \[requests \+ 1\], got list \[0, 17\]"),
    (CASE.cu_seqlens.long(), TypeError, r"int32 \[requests \+ 1\], got int64 \[4\]"),
    (CASE.cu_seqlens[None], ValueError, r"got int32 \[1, 4\]"),
    (CASE.cu_seqlens[:0], ValueError, "at least one element"),
    (integers(1, 5, 5, 14), ValueError, "0 in its first element, got 1"),
    (integers(0, 6, 5, 14), ValueError, "non-decreasing, got 6 then 5 at request 1"),
    (integers(0, 5, 5, 18), ValueError, r"at most tokens=17 in its last element, got 18"),
    (integers(0, 9, 5, 9, 5, 9, 14, 9)[::2], ValueError, "contiguous"),
]
PREFIX_LENS = [
    (300, TypeError, r"int32 \[requests=3\], got int 300"),
    (CASE.prefix_lens.long(), TypeError, r"int32 \[requests=3\], got int64 \[3\]"),
    (integers(300, 7), ValueError, r"int32 \[requests=3\], got int32 \[2\]"),
    (integers(300, -1, 0), ValueError, ">= 0 everywhere, got -1"),
    (integers(2**31 - 5, 0, 0), ValueError, r"at most 2147483647 .*, got 2147483643 \+ 5 at request 0"),
]
SEQ_LENS = [
    (None, TypeError, r"int32 \[requests=3\], got NoneType"),
    (CASE.seq_lens.float(), TypeError, r"got float32 \[3\]"),
    (integers(305, 7), ValueError, r"got int32 \[2\]"),
    (integers(305, -2, 9), ValueError, ">= 0 everywhere, got -2"),
]
GROUPING = {
    "window": [
        (0, ValueError, "an integer >= 1, got 0"),
        (64.0, TypeError, "an integer >= 1, got float 64.0"),
        (2**31, ValueError, r"an integer in 1\.\.2147483647, got 2147483648"),
    ],
    "group_size": [
        (0, ValueError, r"an integer in 1\.\.32, got 0"),
        (33, ValueError, r"an integer in 1\.\.32, got 33"),
        (True, TypeError, "got bool True"),
    ],
    "page_size": [
        (0, ValueError, "an integer >= 1, got 0"),
        ("128", TypeError, "got str '128'"),
        (10**30, ValueError, r"an integer in 1\.\.2147483647, got 10000"),
    ],
}
SCALE = [
    ("1", TypeError, "None, a float or a float32 tensor of one element, got str '1'"),
    (torch.ones(2), ValueError, r"got float32 \[2\]"),
    (torch.ones(1, dtype=torch.float64), TypeError, r"got float64 \[1\]"),
    (True, TypeError, "got bool True"),
    (float("nan"), ValueError, "finite, got float nan"),
    (float("-inf"), ValueError, "finite, got float -inf"),
    (10**400, ValueError, "finite, got int 1000"),
]
BAD = {
    "regroup": {
        "topk_idx": TOPK,
        "cu_seqlens": CU_SEQLENS,
        "prefix_lens": PREFIX_LENS,
        **GROUPING,
        "capacity": [(0, ValueError, "an integer >= 1, got 0"), (1.5, TypeError, "got float 1.5")],
        "guard": [("group", ValueError, "'none' or 'window', got 'group'"), (None, ValueError, "got None")],
        "visits": [
            ([0, 0], TypeError, r"int64 \[original and returned=2\], got list"),
            (integers(0, 0), TypeError, r"got int32 \[2\]"),
            (torch.zeros(3, dtype=torch.int64), ValueError, r"got int64 \[3\]"),
            (torch.zeros(4, dtype=torch.int64)[::2], ValueError, "contiguous, got stride 2"),
        ],
    },
    "prepare_unions": {
        "topk_idx": TOPK,
        "perm": [
            (
                CALLS["prepare_unions"]["perm"].long(),
                TypeError,
                r"int32 \[kv_heads=2, tokens=17\], got int64 \[2, 17\]",
            ),
            (CALLS["prepare_unions"]["perm"][:, :-1], ValueError, r"got int32 \[2, 16\]"),
            (torch.zeros(2, TOKENS, dtype=torch.int32), ValueError, r"a permutation of the token ids 0\.\.4"),
            (
                torch.arange(TOKENS, dtype=torch.int32).flip(0).repeat(2, 1),
                ValueError,
                "for request 0, got another set",
            ),
            (torch.arange(1, TOKENS + 1, dtype=torch.int32).repeat(2, 1), ValueError, "for request 0"),
            (torch.zeros(TOKENS, 2, dtype=torch.int32).T, ValueError, "contiguous"),
        ],
        "cu_seqlens": CU_SEQLENS,
        "seq_lens": SEQ_LENS,
        "prefix_lens": PREFIX_LENS,
        **GROUPING,
    },
    "sparse_prefill": {
        "q": [
            (None, TypeError, r"\[tokens, q_heads, head_dim\], got NoneType"),
            (CASE.q.int(), TypeError, r"bfloat16 or float16 .*, got int32 \[17, 32, 128\]"),
            (CASE.q[0], ValueError, r"got bfloat16 \[32, 128\]"),
            (CASE.q[:, :31], ValueError, "a multiple of kv_heads=2 query heads, got 31"),
            (CASE.q[:, :0], ValueError, "a multiple of kv_heads=2 query heads, got 0"),
        ],
        "k_cache": [
            (CASE.k_cache.view(torch.uint8), TypeError, r"float8_e4m3fn or bfloat16 .*, got uint8"),
            (CASE.k_cache[:, :, :64], ValueError, r"head_dim=128\], got float8_e4m3fn \[\d+, 2, 64\]"),
            (CASE.k_cache[:, 0], ValueError, "got float8_e4m3fn"),
            (CASE.k_cache[:, :0], ValueError, "at least one KV head"),
        ],
        "v_cache": [
            (CASE.v_cache.float(), TypeError, r"float8_e4m3fn \[slots=\d+, kv_heads=2, head_dim=128\], got float32"),
            (CASE.v_cache[:-1], ValueError, "slots="),
        ],
        "topk_idx": [
            *TOPK,
            (CASE.topk_idx[:1], ValueError, "kv_heads=2"),
            (CASE.topk_idx[:, 1:], ValueError, "tokens=17"),
        ],
        "req_to_token": [
            (CASE.req_to_token.long(), TypeError, r"int32 \[request slots, positions\], got int64"),
            (CASE.req_to_token[0], ValueError, "got int32"),
        ],
        "slot_ids": [
            (CASE.slot_ids.float(), TypeError, r"int32 or int64 \[requests=3\], got float32 \[3\]"),
            (CASE.slot_ids[:2], ValueError, r"got int64 \[2\]"),
            (integers(0, 1, 5), ValueError, r"in 0\.\.4 \(rows of req_to_token\), got 0\.\.5"),
            (integers(0, 1, -1), ValueError, r"got -1\.\.1"),
        ],
        "cu_seqlens": CU_SEQLENS,
        "seq_lens": [
            *SEQ_LENS,
            (integers(305, 100_000, 9), ValueError, r"at most positions=\d+ of req_to_token, got 100000"),
        ],
        "prefix_lens": PREFIX_LENS,
        "sm_scale": [
            ("1", TypeError, "None or a float, got str"),
            (torch.ones(1), TypeError, "got float32"),
            SCALE[-1],
        ],
        "k_scale": SCALE,
        "v_scale": SCALE,
        "page_size": GROUPING["page_size"],
        "config": [
            ("paper", TypeError, "Config, got str 'paper'"),
            (pw.Config(mode="native"), ValueError, "mode 'union8', 'pageweaver' or 'auto'"),
        ],
        "workspace": [
            (5, TypeError, "Workspace, got int 5"),
            (pw.Workspace(20, 3, kv_heads=1, topk=16, device="cpu"), ValueError, "kv_heads=2, got kv_heads=1"),
            (pw.Workspace(20, 3, kv_heads=2, topk=8, device="cpu"), ValueError, "topk=16, got topk=8"),
            (
                pw.Workspace(20, 3, kv_heads=2, topk=16, window=128, device="cpu"),
                ValueError,
                "window=64, got window=128",
            ),
            (pw.Workspace(20, 3, kv_heads=2, topk=16, group_size=4, device="cpu"), ValueError, "group_size=8"),
            (
                pw.Workspace(20, 3, kv_heads=2, topk=16, q_heads=16, device="cpu"),
                ValueError,
                "q_heads=32, got q_heads=16",
            ),
            (
                pw.Workspace(20, 3, kv_heads=2, topk=16, q_heads=32, dtype=torch.float16, device="cpu"),
                ValueError,
                "dtype=torch.bfloat16",
            ),
            (
                pw.Workspace(20, 3, kv_heads=2, topk=16, q_heads=32, head_dim=64, device="cpu"),
                ValueError,
                "head_dim=128",
            ),
        ],
        "value_tiles": [
            (CASE.v_cache, TypeError, "a pageweaver_sglang.ValueTiles, got float8_e4m3fn"),
            (pw.ValueTiles.empty(2, 4, device="cpu"), ValueError, r"marks int32 \[2, \d+\], got marks int32 \[2, 4\]"),
            (pw.ValueTiles.empty(1, POOL_PAGES, device="cpu"), ValueError, r"got marks int32 \[1, "),
            (pw.ValueTiles.empty(2, POOL_PAGES, device="meta"), ValueError, "marks on cpu, got marks on meta"),
            (pw.ValueTiles(MARKS.to(torch.int8), TILES), ValueError, "int32 .*, got marks int8"),
            (pw.ValueTiles(MARKS, TILES.view(torch.int8)), ValueError, "tiles uint8 .*, got tiles int8"),
            (
                pw.ValueTiles(MARKS, TILES[:, :, :-16]),
                ValueError,
                r"tiles uint8 \[.*16384\], got tiles uint8 \[.*16368\]",
            ),
            (pw.ValueTiles(MARKS, TILES.to("meta")), ValueError, "tiles on cpu, got tiles on meta"),
            (pw.ValueTiles(MARKS, UNALIGNED_TILES), ValueError, "contiguous tiles at a multiple of 16 bytes"),
            (pw.ValueTiles(MARKS.repeat(2, 1).T.contiguous().T[:2], TILES), ValueError, "contiguous marks"),
        ],
        "decision": [
            (True, TypeError, "what pageweaver_sglang.History.decide returns, got bool True"),
            (
                Decision(True, "first", measurement=Measurement(None, 0, torch.zeros(2, device="meta"))),
                ValueError,
                "of a History of calls on cpu like the other arguments, got one that counts on meta",
            ),
        ],
        "out": [
            (CASE.q.float(), TypeError, r"bfloat16 \[tokens=17, q_heads=32, head_dim=128\], got float32"),
            (CASE.q[:-1], ValueError, r"got bfloat16 \[16, 32, 128\]"),
            (CASE.q.new_empty(TOKENS, 64, 128)[:, ::2], ValueError, "contiguous"),
        ],
    },
}
EVERY = [
    pytest.param(function, name, *case, id=f"{function}-{name}-{index}")
    for function, arguments in BAD.items()
    for name, cases in arguments.items()
    for index, case in enumerate(cases)
]


@pytest.mark.parametrize("engine", [pw, pw.reference], ids=["public", "reference"])
@pytest.mark.parametrize(("function", "name", "value", "kind", "message"), EVERY)
def test_bad_argument(engine, function, name, value, kind, message):
    arguments = CALLS[function] | {name: value}
    with pytest.raises(kind, match=rf"^{function}: {name} must be .*({message})") as caught:
        getattr(engine, function)(**arguments)
    assert type(caught.value) is kind


@pytest.mark.parametrize("function", CALLS)
def test_the_call_that_the_bad_ones_are_made_from_is_good(function):
    getattr(pw, function)(**CALLS[function])


@pytest.mark.parametrize("function", CALLS)
def test_every_argument_has_a_bad_value_above(function):
    import inspect

    assert set(BAD[function]) == set(inspect.signature(getattr(pw, function)).parameters)


@pytest.mark.parametrize("function", CALLS)
def test_public_and_reference_functions_take_the_same_arguments(function):
    import inspect

    public, engine = (inspect.signature(getattr(module, function)) for module in (pw, pw.reference))
    assert public == engine


def test_the_example_of_the_contract():
    with pytest.raises(
        TypeError, match=re.escape("regroup: topk_idx must be int32 [kv_heads, tokens, k], got float32 [3, 4]")
    ):
        pw.regroup(torch.zeros(3, 4), CASE.cu_seqlens, CASE.prefix_lens)


@pytest.mark.parametrize(
    ("function", "name"),
    [(f, n) for f, call in CALLS.items() for n in call if n != "q" and (f == "sparse_prefill" or n != "topk_idx")],
)
def test_tensors_of_another_device_are_refused(function, name):
    value = CALLS[function][name].to("meta")
    with pytest.raises(ValueError, match=rf"^{function}: {name} must be on cpu like the other arguments, got .*meta"):
        getattr(pw, function)(**CALLS[function] | {name: value})


def test_a_workspace_that_is_too_small_is_refused():
    for tokens, requests in ((16, 3), (17, 2)):
        workspace = pw.Workspace(tokens, requests, kv_heads=2, topk=16, device="cpu")
        message = f"a call of 17 tokens and 3 requests .* max_tokens={tokens}, max_requests={requests}"
        with pytest.raises(ValueError, match=message):
            pw.sparse_prefill(**CALLS["sparse_prefill"], workspace=workspace)
    fitting = pw.Workspace(17, 3, kv_heads=2, topk=16, device="cpu")
    pw.sparse_prefill(**CALLS["sparse_prefill"], workspace=fitting)


def test_unsupported_is_a_value_error():
    assert issubclass(pw.UnsupportedError, ValueError)

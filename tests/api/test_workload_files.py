"""Workload files: what is read, what is refused and how, and writing."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import pageweaver_sglang as pw

DATA = Path(__file__).parents[1] / "data"


def indices(**changes):
    arrays = {
        "topk_idx": np.array([[[0, 1], [1, -1], [0, 2]]], dtype=np.int32),
        "cu_seqlens": np.array([0, 3], dtype=np.int32),
        "prefix_lens": np.array([8], dtype=np.int32),
        "seq_lens": np.array([11], dtype=np.int32),
        "page_size": np.int32(4),
    }
    return arrays | changes


def tensors(**changes):
    random = np.random.default_rng(0)
    pages = (3, 4, 1, 16)
    return (
        indices()
        | {
            "q": random.integers(0, 1 << 14, (3, 2, 16), dtype=np.uint16),
            "k_pages": random.integers(0, 100, pages, dtype=np.uint8),
            "v_pages": random.integers(0, 100, pages, dtype=np.uint8),
            "page_ids": np.array([2, 0, 1], dtype=np.int32),
            "page_slots": np.array([7, 5, 9], dtype=np.int32),
            "out": random.integers(0, 1 << 14, (3, 2, 16), dtype=np.uint16),
        }
        | changes
    )


@pytest.fixture
def saved(tmp_path):
    def save(arrays):
        path = tmp_path / "w.npz"
        np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
        return path

    return save


@pytest.mark.parametrize("path", sorted(DATA.glob("*.npz")), ids=lambda path: path.stem)
def test_every_recorded_file_is_read(path, tmp_path):
    workload = pw.load_workload(path)
    assert workload.topk_idx.dtype == workload.cu_seqlens.dtype == torch.int32
    assert workload.page_size == 128
    assert (workload.q is not None) == (path.stem == "m3_tiny_layer")
    workload.save(tmp_path / "copy.npz")
    with np.load(path) as before, np.load(tmp_path / "copy.npz") as after:
        assert sorted(before.files) == sorted(after.files)
        for name in before.files:
            assert before[name].dtype == after[name].dtype
            assert np.array_equal(before[name], after[name])


def test_types_of_a_capture():
    workload = pw.load_workload(DATA / "m3_tiny_layer.npz")
    assert workload.q.dtype == workload.out.dtype == torch.bfloat16
    assert workload.k_pages.dtype == workload.v_pages.dtype == torch.float8_e4m3fn
    assert workload.page_ids.dtype == workload.page_slots.dtype == torch.int32
    assert workload.q.float().isfinite().all()


def test_attention_arguments_lead_to_the_right_cells(saved):
    workload = pw.load_workload(saved(tensors()))
    arguments = workload.attention_arguments()
    for entry, page in enumerate(workload.page_ids.tolist()):
        for token in range(4):
            cell = int(arguments["req_to_token"][0, page * 4 + token])
            for cache, pages in (("k_cache", workload.k_pages), ("v_cache", workload.v_pages)):
                got, expected = arguments[cache][cell].view(torch.uint8), pages[entry, token].view(torch.uint8)
                assert torch.equal(got, expected)
    assert pw.sparse_prefill(**arguments).shape == (3, 2, 16)


def test_attention_arguments_need_tensors(saved):
    with pytest.raises(ValueError, match="holds indices only"):
        pw.load_workload(saved(indices())).attention_arguments()


def test_optional_arrays_are_optional(saved):
    workload = pw.load_workload(saved(tensors(out=None, page_slots=None)))
    assert workload.out is None
    assert workload.page_slots is None
    workload.attention_arguments()


WRONG = [
    ({"topk_idx": None}, "lacks topk_idx"),
    ({"seq_lens": None, "page_size": None}, "lacks seq_lens, page_size"),
    ({"extra": np.zeros(3)}, "unknown array extra; known: topk_idx, cu_seqlens"),
    (
        {"topk_idx": np.zeros((1, 3, 2), np.int64)},
        r"topk_idx must be int32 \[kv_heads, tokens, k\], got int64 \[1, 3, 2\]",
    ),
    ({"topk_idx": np.zeros((3, 2), np.int32)}, r"topk_idx must be int32 \[kv_heads, tokens, k\], got int32 \[3, 2\]"),
    ({"cu_seqlens": np.array([0, 3], np.float32)}, r"cu_seqlens must be int32 \[requests \+ 1\], got float32 \[2\]"),
    ({"cu_seqlens": np.array([1, 3], np.int32)}, "cu_seqlens must begin with 0 and not decrease"),
    ({"cu_seqlens": np.array([0, 4], np.int32)}, "cu_seqlens must end at most at tokens=3, got 4"),
    ({"cu_seqlens": np.array([0], np.int32)}, r"prefix_lens must be int32 \[requests=0\], got int32 \[1\]"),
    (
        {name: np.zeros(size, np.int32) for name, size in (("cu_seqlens", 1), ("prefix_lens", 0), ("seq_lens", 0))},
        "cu_seqlens must have at least one request, got none",
    ),
    ({"cu_seqlens": np.array([], np.int32)}, "cu_seqlens|prefix_lens"),
    ({"cu_seqlens": np.array([0, 3, 2], np.int32)}, r"prefix_lens must be int32 \[requests=2\], got int32 \[1\]"),
    (
        {
            "cu_seqlens": np.array([0, 3, 2], np.int32),
            "prefix_lens": np.zeros(2, np.int32),
            "seq_lens": np.zeros(2, np.int32),
        },
        r"not decrease, got \[0, 3, 2\]",
    ),
    ({"prefix_lens": np.array([-1], np.int32)}, "prefix_lens must be >= 0 everywhere, got -1"),
    ({"seq_lens": np.array([-5], np.int32)}, "seq_lens must be >= 0 everywhere, got -5"),
    ({"seq_lens": np.array([5, 6], np.int32)}, r"seq_lens must be int32 \[requests=1\], got int32 \[2\]"),
    ({"page_size": np.int32(0)}, "page_size must be an integer >= 1, got 0"),
    ({"page_size": np.float32(4)}, r"page_size must be int32 \[\], got float32 \[\]"),
    ({"page_size": np.array([4], np.int32)}, r"page_size must be int32 \[\], got int32 \[1\]"),
    ({"q": np.zeros((3, 2, 16), np.float32)}, r"q must be uint16 \[tokens, q_heads, head_dim\], got float32"),
    (
        {"q": np.zeros((4, 2, 16), np.uint16)},
        r"q must be bfloat16 \[tokens=3, q_heads, head_dim\], got bfloat16 \[4, 2, 16\]",
    ),
    ({"out": np.zeros((3, 2, 8), np.uint16)}, r"out must be bfloat16 .*head_dim=16\], got bfloat16 \[3, 2, 8\]"),
    (
        {"k_pages": np.zeros((3, 8, 1, 16), np.uint8)},
        r"k_pages must be .*page_size=4, .*, got float8_e4m3fn \[3, 8, 1, 16\]",
    ),
    (
        {"v_pages": np.zeros((2, 4, 1, 16), np.uint8)},
        r"v_pages must be .*\[pages=3, .*, got float8_e4m3fn \[2, 4, 1, 16\]",
    ),
    ({"k_pages": np.zeros((3, 4, 2, 16), np.uint8)}, r"k_pages must be .*kv_heads=1"),
    ({"v_pages": None}, "k_pages, v_pages, page_ids must be given together, got k_pages, page_ids"),
    ({"page_ids": np.array([0, 1], np.int32)}, r"page_ids must be int32 \[pages=3\]"),
    ({"page_ids": np.array([0, 1, 1], np.int32)}, r"page_ids must be distinct ids in 0\.\.2"),
    ({"page_ids": np.array([0, 1, 3], np.int32)}, r"page_ids must be distinct ids in 0\.\.2"),
    ({"page_ids": np.array([0, 1, -1], np.int32)}, r"page_ids must be distinct ids in 0\.\.2"),
    ({"k_pages": None, "v_pages": None, "page_ids": None}, "page_slots must be given with page_ids"),
    (
        {
            "topk_idx": np.zeros((3, 3, 2), np.int32),
            **{name: np.zeros((3, 4, 3, 16), np.uint8) for name in ("k_pages", "v_pages")},
        },
        "q must have a multiple of kv_heads=3 heads, got 2",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_content_is_named(saved, changes, message):
    with pytest.raises(ValueError, match=rf"^load_workload: .*w\.npz: .*({message})"):
        pw.load_workload(saved(tensors(**changes)))


def packed_tensors(**changes):
    """Two requests: pages 2 and 0 of the first, 0 of the second."""
    return tensors(
        cu_seqlens=np.array([0, 1, 3], np.int32),
        prefix_lens=np.array([8, 0], np.int32),
        seq_lens=np.array([9, 2], np.int32),
        page_ids=np.array([2, 0, 0], np.int32),
        page_requests=np.array([0, 0, 1], np.int32),
        **changes,
    )


def test_pages_of_several_requests(saved):
    workload = pw.load_workload(saved(packed_tensors()))
    arguments = workload.attention_arguments()
    assert arguments["req_to_token"].shape == (2, 12)
    assert arguments["slot_ids"].tolist() == [0, 1]
    assert arguments["req_to_token"][0, 8:].tolist() == [0, 1, 2, 3]
    assert arguments["req_to_token"][0, :4].tolist() == [4, 5, 6, 7]
    assert arguments["req_to_token"][1, :4].tolist() == [8, 9, 10, 11]
    assert pw.sparse_prefill(**arguments).shape == (3, 2, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_requests": None}, "page_ids must come with page_requests when there are several requests, got 2"),
        ({"page_requests": np.array([0, 0, 2], np.int32)}, r"page_requests must be in 0\.\.1"),
        ({"page_requests": np.array([0, 0, -1], np.int32)}, r"page_requests must be in 0\.\.1"),
        ({"page_requests": np.array([1, 0, 1], np.int32)}, r"page_ids must be distinct ids in 0\.\.2, inside"),
        ({"page_ids": np.array([0, 0, 0], np.int32)}, r"page_ids must be distinct ids in 0\.\.2 in every request"),
    ],
)
def test_pages_that_belong_nowhere(saved, changes, message):
    with pytest.raises(ValueError, match=rf"^load_workload: .*w\.npz: {message}"):
        pw.load_workload(saved(packed_tensors() | changes))


def test_bfloat16_pages(saved):
    random = np.random.default_rng(1)
    pages = {name: random.integers(0, 1 << 14, (3, 4, 1, 16), dtype=np.uint16) for name in ("k_pages", "v_pages")}
    workload = pw.load_workload(saved(tensors(**pages)))
    assert workload.attention_arguments()["k_cache"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="v_pages must be bfloat16 like k_pages, got float8_e4m3fn"):
        pw.load_workload(saved(tensors(k_pages=pages["k_pages"])))


def test_numbers_of_a_capture(saved, tmp_path):
    numbers = {"sm_scale": np.float64(0.3), "k_scale": np.float64(2), "v_scale": np.float64(0.5), "layer": np.int32(7)}
    workload = pw.load_workload(saved(tensors(**numbers)))
    assert (workload.sm_scale, workload.k_scale, workload.v_scale, workload.layer) == (0.3, 2.0, 0.5, 7)
    arguments = workload.attention_arguments()
    assert {name: arguments[name] for name in ("sm_scale", "k_scale", "v_scale")} == {
        "sm_scale": 0.3,
        "k_scale": 2.0,
        "v_scale": 0.5,
    }
    plain = pw.load_workload(saved(tensors())).attention_arguments()
    assert "sm_scale" not in plain
    assert not torch.equal(pw.sparse_prefill(**arguments), pw.sparse_prefill(**plain))
    workload.save(tmp_path / "again.npz", compress=False)
    assert pw.load_workload(tmp_path / "again.npz").k_scale == 2.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("k_scale", np.float64("nan"), "k_scale must be a finite number, got nan"),
        ("k_scale", np.float32(1), r"k_scale must be float64 \[\], got float32 \[\]"),
        ("layer", np.int32(-1), "layer must be an integer in 0"),
    ],
)
def test_wrong_numbers(saved, name, value, message):
    with pytest.raises(ValueError, match=message):
        pw.load_workload(saved(tensors(**{name: value})))


class Harmful:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_pickled_content_is_refused_and_not_run(saved, tmp_path):
    mark = tmp_path / "ran"
    path = saved(indices(extra=np.array([Harmful(mark)], dtype=object)))
    with pytest.raises(ValueError, match=r"^load_workload: .*cannot be read as an \.npz of plain arrays"):
        pw.load_workload(path)
    bare = tmp_path / "bare.npz"
    bare.write_bytes(pickle.dumps(Harmful(mark)))
    with pytest.raises(ValueError, match=r"^load_workload: .*cannot be read as an \.npz of plain arrays"):
        pw.load_workload(bare)
    assert not mark.exists()
    with np.load(path, allow_pickle=True) as archive:
        assert archive["extra"] is not None
    assert mark.exists(), "the content must be harmful for this test to mean anything"


def test_files_that_are_no_archives(tmp_path):
    path = tmp_path / "w.npz"
    np.save(tmp_path / "single.npy", np.zeros(3))
    (tmp_path / "single.npy").rename(path)
    with pytest.raises(ValueError, match="a single array"):
        pw.load_workload(path)
    path.write_bytes(b"words\n")
    with pytest.raises(ValueError, match="of plain arrays: it is no zip archive"):
        pw.load_workload(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be read"):
        pw.load_workload(path)
    whole = (DATA / "ctx8k.npz").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be read"):
        pw.load_workload(path)
    # Damage shows as a broken stream here and as a wrong checksum there.
    for first in range(1000, 36_000, 5000):
        broken = bytearray(whole)
        broken[first : first + 100] = b"\xff" * 100
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="cannot be read"):
            pw.load_workload(path)
    with pytest.raises(FileNotFoundError):
        pw.load_workload(tmp_path / "none.npz")


def test_a_workload_made_in_memory_is_checked_too(saved, tmp_path):
    good = pw.load_workload(saved(tensors()))
    fields = {name: getattr(good, name) for name in good.__dataclass_fields__}
    with pytest.raises(ValueError, match=r"^Workload: topk_idx must be int32 .*, got int64"):
        pw.Workload(**fields | {"topk_idx": good.topk_idx.long()})
    with pytest.raises(ValueError, match=r"^Workload: q must be bfloat16 .*, got float16"):
        pw.Workload(**fields | {"q": good.q.half()})
    with pytest.raises(ValueError, match=r"^Workload: seq_lens must be int32 .*, got list"):
        pw.Workload(**fields | {"seq_lens": [11]})
    with pytest.raises(ValueError, match=r"must end in \.npz, got w\.npy"):
        good.save(tmp_path / "w.npy")

"""Page lists per query against a naive version, and both FlashInfer arms through stand-ins with its signatures."""

import sys
import types
from itertools import pairwise

import pytest
import torch

from pageweaver_sglang import reference
from pageweaver_sglang.bench.fidelity import compare_rows
from pageweaver_sglang.bench.inputs import Step3Inputs
from pageweaver_sglang.bench.peers import flashinfer as arms
from pageweaver_sglang.bench.peers.page_tables import PageTables
from pageweaver_sglang.bench.protocol import ArmUnavailable
from pageweaver_sglang.flashinfer import xqa
from tests.fake_xqa import modules
from tests.generators import make_case
from tests.naive import support_set

# Every query must see something; in "holes" and others some don't.
CASES = ["tail", "first_chunk", "packed", "duplicates", "unsorted", "heads4", "few_picks", "int32_slots", "padded"]


def inputs_of_case(name, **changes):
    case = make_case(name, seed=2, **changes)
    return Step3Inputs(*case.args(), page_size=case.page_size, max_seqlen_q=int(case.cu_seqlens.diff().max()))


def naive_lists(inputs, head):
    """(physical pages, visible tokens) of every query; the own page last."""
    size, lists = inputs.page_size, []
    bounds = inputs.cu_seqlens.tolist()
    for request, prefix in enumerate(inputs.prefix_lens.tolist()):
        length = int(inputs.seq_lens[request])
        table = inputs.req_to_token[int(inputs.slot_ids[request])].tolist()
        for query in range(bounds[request], bounds[request + 1]):
            limit = min(prefix + query - bounds[request], length - 1)
            pages = sorted(support_set(inputs.topk_idx[head, query].tolist(), length, size))
            pages = [page for page in pages if page <= limit // size]
            last = limit % size + 1 if pages and pages[-1] == limit // size else size
            tokens = (len(pages) - 1) * size + last
            lists.append(([table[page * size] // size for page in pages], tokens))
    return lists


@pytest.mark.parametrize("name", CASES)
def test_lists_are_the_naive_ones(name):
    inputs = inputs_of_case(name)
    tables = PageTables(inputs)
    for head in range(len(inputs.topk_idx)):
        table, count, tail = tables.build(head)
        assert table.dtype == count.dtype == tail.dtype == torch.int32
        lengths = tables.tokens_of(count, tail).tolist()
        found = [(row[:n], length) for row, n, length in zip(table.tolist(), count.tolist(), lengths, strict=True)]
        assert found == naive_lists(inputs, head)


def test_rows_as_the_indexer_writes_them_are_not_sorted(monkeypatch):
    assert PageTables(inputs_of_case("tail")).own_last
    without_own = inputs_of_case("tail")
    without_own.topk_idx[..., 1:] = torch.where(without_own.topk_idx[..., 1:] >= 20, -1, without_own.topk_idx[..., 1:])
    tables = PageTables(without_own)
    assert (tables.ascending, tables.own_last) == (True, False)
    table, count, tail = tables.build(0)
    lengths = tables.tokens_of(count, tail).tolist()
    found = [(row[:n], length) for row, n, length in zip(table.tolist(), count.tolist(), lengths, strict=True)]
    assert found == naive_lists(without_own, 0)
    assert not PageTables(inputs_of_case("unsorted")).ascending
    assert not PageTables(inputs_of_case("duplicates")).ascending
    tables = PageTables(inputs_of_case("packed"))
    monkeypatch.setattr(torch.Tensor, "sort", None)
    tables.build(0)


@pytest.mark.parametrize("name", ["holes", "all_invalid"])
def test_a_query_without_pages_makes_the_arm_unavailable(name):
    with pytest.raises(ArmUnavailable, match="sees nothing"):
        PageTables(inputs_of_case(name))


def attend_lists(q, k_pages, v_pages, lists, lengths, scale, out):
    for row, (pages, length) in enumerate(zip(lists, lengths, strict=True)):
        k, v = (cache[pages].flatten(0, 1)[:length, 0].double() for cache in (k_pages, v_pages))
        out[row] = ((q[row].double() @ k.T * scale).softmax(1) @ v).to(out.dtype)


class BatchPrefillWithPagedKVCacheWrapper:
    """What the arm uses of the class, with the positional order of ``plan`` in 0.6.15 and 0.7.4."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, *, backend="auto"):
        assert (kv_layout, backend) == ("NHD", "fa2")

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        sm_scale=None,
        q_data_type="float16",
        kv_data_type=None,
        disable_split_kv=False,
    ):
        assert (num_kv_heads, head_dim_qk, causal) == (1, 128, False)
        self.heads = num_qo_heads
        assert qo_indptr.tolist() == list(range(len(qo_indptr)))
        assert kv_data_type == torch.float8_e4m3fn
        self.start, self.last, self.scale, self.size = paged_kv_indptr, paged_kv_last_page_len, sm_scale, page_size
        self._paged_kv_indices_buf = paged_kv_indices

    def run(self, q, paged_kv_cache, *, out=None):
        assert q.shape[1] == self.heads
        start, indices = self.start.tolist(), self._paged_kv_indices_buf.tolist()
        lists = [indices[a:b] for a, b in pairwise(start)]
        lengths = [(len(pages) - 1) * self.size + last for pages, last in zip(lists, self.last.tolist(), strict=True)]
        attend_lists(q, *paged_kv_cache, lists, lengths, self.scale, out)
        return out


@pytest.fixture
def installed(monkeypatch):
    prefill = types.ModuleType("flashinfer.prefill")
    prefill.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    for name, module in (modules() | {prefill.__name__: prefill}).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize("arm_class", [arms.XqaArm, arms.Fa2Arm])
@pytest.mark.parametrize(
    ("name", "ratio"), [("tail", 16), ("heads4", 16), ("unsorted", 16), ("padded", 16), ("heads4", 8), ("tail", 1)]
)
def test_arms_equal_the_reference(installed, arm_class, name, ratio):
    # Equal picks and other pages and values in the second set, as the benchmark has it.
    first = inputs_of_case(name, requests=((40, 1500), (11, 0)), ratio=ratio)
    shift = first.k_cache.shape[0] - 128
    moved = {
        "req_to_token": (first.req_to_token + 128) % (shift + 128),
        "q": first.q.flip(0),
        "k_cache": first.k_cache.roll(128, 0),
        "v_cache": first.v_cache.roll(128, 0),
    }
    second = Step3Inputs(**{**vars(first), **moved})
    arm = arm_class()
    arm.prepare([first, second])
    for index, inputs in ((1, second), (0, first)):
        exact = reference.sparse_prefill(**{**inputs.kwargs(), "q": inputs.q.double()})
        assert compare_rows(arm.call(index), exact)["nrms"] < 4e-3
    notes = arm.notes()
    assert notes["rows_sorted_in_call"] == (name == "unsorted")
    assert ("plan_ms" in notes) == (arm_class is arms.Fa2Arm)
    arm.release()


def test_large_batches_are_split(installed, monkeypatch):
    monkeypatch.setattr(xqa, "MAX_BATCH", 16)
    inputs = inputs_of_case("first_chunk", requests=((50, 0),))
    arm = arms.XqaArm()
    arm.prepare([inputs])
    exact = reference.sparse_prefill(**{**inputs.kwargs(), "q": inputs.q.double()})
    assert compare_rows(arm.call(0), exact)["nrms"] < 4e-3


def test_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    for arm in (arms.XqaArm(), arms.Fa2Arm()):
        with pytest.raises(ArmUnavailable, match="FlashInfer can't be imported"):
            arm.prepare([inputs_of_case("tail")])

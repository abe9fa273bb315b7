"""The page-pair control: the pairing against sets, the kernels in Triton's interpreter against the reference engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pageweaver_sglang.bench.peers.page_pair.pairing import TILE, match_pages, pair_pages
from tests.generators import make_case
from tests.naive import support_set

ROOT = Path(__file__).resolve().parents[2]


def test_pairs_have_most_common_queries_first():
    common = torch.tensor([[9, 3, 5, 0], [3, 9, 4, 0], [5, 4, 9, 5], [0, 0, 5, 9]])
    # (0, 2) and (2, 3) share five queries each: the smaller ids win, and 3 is left without a partner.
    assert match_pages(common) == [(0, 2)]
    common[0, 1] = common[1, 0] = 6
    assert match_pages(common) == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    "name", ["packed", "holes", "duplicates", "future", "padded", "cut_short", "all_invalid", "heads4"]
)
def test_every_pick_is_met_exactly_once(name):
    case = make_case(name, seed=1)
    plan = pair_pages(case.topk_idx, case.cu_seqlens, case.seq_lens, case.prefix_lens, page_size=case.page_size)
    bounds = case.cu_seqlens.tolist()
    wanted = set()
    for head, rows in enumerate(case.topk_idx.tolist()):
        for request, (prefix, length) in enumerate(zip(case.prefix_lens.tolist(), case.seq_lens.tolist(), strict=True)):
            for query in range(bounds[request], bounds[request + 1]):
                limit = min(prefix + query - bounds[request], length - 1)
                pages = support_set(rows[query], length, case.page_size)
                wanted |= {(head, query, page) for page in pages if page * case.page_size <= limit}

    met, parts = [], []
    for item, (pages, queries) in enumerate(zip(plan.pages.tolist(), plan.queries.tolist(), strict=True)):
        head = int(plan.heads[item])
        assert len(queries) == TILE
        for slot, query in enumerate(queries):
            if query >= 0:
                met += [(head, query, page) for page in pages if page >= 0]
                parts.append((head, query, int(plan.partials[item, slot])))
                assert bounds[plan.requests[item]] <= query < bounds[plan.requests[item] + 1]
    assert len(met) == len(set(met))
    assert set(met) == wanted
    # A query's parts are numbered 0, 1, 2, ... and fit the padded workspace.
    counts = plan.counts.tolist()
    assert sorted(parts) == [
        (head, query, part) for head, row in enumerate(counts) for query, n in enumerate(row) for part in range(n)
    ]
    assert plan.max_partials == max(map(max, counts))
    assert plan.visits() == int((plan.pages >= 0).sum())
    assert plan.common + plan.exclusive == len(parts)
    used, padded = plan.used_workspace_bytes(16, 128, 2), plan.padded_workspace_bytes(16, 128, 2)
    assert used == len(parts) * 16 * (128 * 2 + 4)
    assert padded == case.topk_idx.shape[0] * case.topk_idx.shape[1] * plan.max_partials * 16 * (128 * 2 + 4)


def test_common_queries_share_one_part():
    # Four queries that picked pages 0 and 1, two that picked only 0.
    topk = torch.tensor([[[0, 1]] * 4 + [[0, -1]] * 2], dtype=torch.int32)
    ints = [torch.tensor(values, dtype=torch.int32) for values in ([0, 6], [262], [256])]
    plan = pair_pages(topk, *ints, page_size=128)
    assert (plan.pairs, plan.singles, plan.common, plan.exclusive) == (1, 0, 4, 2)
    assert plan.pages.tolist() == [[0, 1], [0, -1]]
    assert plan.queries.tolist() == [[0, 1, 2, 3, -1, -1, -1, -1], [4, 5, -1, -1, -1, -1, -1, -1]]
    assert plan.counts.tolist() == [[1] * 6]


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = ROOT / "tests/bench/programs/page_pair.py"
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("NRMS") == 4

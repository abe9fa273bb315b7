"""Record prefill calls in every mode through SGLang's own backend; reports what was recorded and what it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

from serving_process import start  # isort: skip
import torch

server_args = start()

from sparse_case import Case  # noqa: E402

import pageweaver_sglang as pw  # noqa: E402
from pageweaver_sglang.config import load_config  # noqa: E402
from pageweaver_sglang.plugin import step3  # noqa: E402

folder = Path(os.environ["PAGEWEAVER_CAPTURE_DIR"])
report: dict = {}


def record(name: str, mode: str, prefixes, extends, **options) -> None:
    """One call of one layer; then replay its file with the reference engine."""
    before = set(folder.glob("*.npz"))
    case = Case(server_args, prefixes, extends, **options)
    recorder = case.backend.sparse.step3.recorder
    config = load_config().model_copy(update={"mode": mode})
    out, picked = case.prefill(config)
    # What the model does afterwards must not reach the file.
    for buffer in (*case.pool.main_pool.k_buffer, *case.pool.main_pool.v_buffer):
        buffer.zero_()
    kept = out[: sum(extends)].clone()  # SGLang cuts padding rows off before Step 3
    out.zero_()
    case.prefill(config, layer_id=2) if options.get("layers", 2) > 2 else None
    recorder.close()
    files = sorted(set(folder.glob("*.npz")) - before)
    workload = pw.load_workload(files[0])
    replayed = pw.reference.sparse_prefill(**workload.attention_arguments())
    verification = step3.compare(replayed, kept)
    report[name] = {
        "files": [file.name for file in files],
        "layer": workload.layer,
        "requests": [workload.cu_seqlens.diff().tolist(), workload.prefix_lens.tolist(), workload.seq_lens.tolist()],
        "cache": str(workload.k_pages.dtype),
        "same picks": torch.equal(workload.topk_idx, picked),
        "same output": torch.equal(workload.out, kept),
        "stored pages": len(workload.page_ids),
        "nrms": verification.nrms,
        "max error": verification.max_error,
        "by arm": dict(case.backend.sparse.step3.stats.calls_by_arm),
    }


record("pageweaver", "pageweaver", [700], [6], layers=3)
record("native", "native", [700], [6])
record("packed", "pageweaver", [700, 0, 2400], [3, 10, 2], dtype=torch.float8_e4m3fn)
record("packed native", "native", [300, 0], [3, 3], dtype=torch.float8_e4m3fn, kv_heads=2)
record("padded rows", "pageweaver", [130], [3], padding=2)

# Without a folder nothing is made and nothing started.
os.environ["PAGEWEAVER_CAPTURE_DIR"] = ""
report["off"] = Case(server_args, [0], [4]).backend.sparse.step3.recorder is None

# A folder that cannot be used stops the server while it starts.
os.environ["PAGEWEAVER_CAPTURE_DIR"] = str(Path(__file__) / "inside-a-file")
try:
    Case(server_args, [0], [4])
    report["bad folder"] = None
except Exception as error:
    report["bad folder"] = f"{type(error).__name__}: {error}"

with open(os.environ["REPORT"], "w") as file:
    json.dump(report, file)

"""Prompts sent before anything is measured.

Triton tunes SGLang's native Step 3 once per process, on the size of its first call, and keeps that choice. So the
longest prompt comes first: the choice is then made on a full chunk, for native's benefit. After it comes every prompt
length at every concurrency, so that kernels are compiled and buffers have grown before the first measured request.
"""

from __future__ import annotations

import http.client
import json
import random
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .launch import HOST
from .settings import Cell, Settings

DESCRIPTION = (
    "SGLang's own warm-up is skipped; the longest prompt is sent first, so that Triton tunes the native kernel on a "
    "full chunk; then, per prompt length (longest first) and concurrency, twice as many requests as run at a time"
)


def warmup_cells(settings: Settings) -> list[Cell]:
    """One prompt of the longest length alone, then every load, longest prompts first."""
    loads = sorted(settings.cells, key=lambda cell: (-cell.prompt, cell.concurrency))
    return [Cell(max(settings.prompts), 1), *(cell for cell in loads)]


def vocabulary(model: str) -> int:
    """Token ids that the model knows, from its ``config.json``; 1000 where that can't be read."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 1000


def warm_up(settings: Settings, port: int) -> int:
    """Send the prompts; returns how many were answered.

    Raises:
        OSError: the server doesn't answer, or answers with an error.
    """
    size = vocabulary(settings.model)
    # The middle of the vocabulary: special tokens lie at its ends.
    generator, first, last = random.Random(settings.seed), size // 2, size * 3 // 4
    sent = 0
    for number, cell in enumerate(warmup_cells(settings)):
        count = 2 * cell.concurrency if number else 1
        prompts = [[generator.randint(first, last) for _ in range(cell.prompt)] for _ in range(count)]
        with ThreadPoolExecutor(cell.concurrency) as pool:
            for answer in [pool.submit(_send, port, prompt, settings.client_timeout) for prompt in prompts]:
                answer.result()
        sent += count
    return sent


def _send(port: int, prompt: list[int], timeout: float) -> None:
    sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"http://{HOST}:{port}/generate", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            response.read()
    except urllib.error.HTTPError as error:
        raise OSError(f"HTTP {error.code}: {error.read()[:300].decode(errors='replace')}") from error
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error

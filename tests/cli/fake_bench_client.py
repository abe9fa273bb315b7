"""Stands in for `python -m sglang.benchmark.serving`: takes its arguments, asks the server, writes its result file.

FAKE_CLIENT_FAIL=N:C makes the load of N tokens at concurrency C fail; FAKE_HANG_CLIENT makes it hang.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def cli_main() -> None:
    parser = argparse.ArgumentParser()
    # Only what the real client knows: an unknown argument ends this one too.
    for name in ("backend", "host", "model", "dataset-name", "output-file", "extra-request-body"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "random-input-len", "random-output-len", "num-prompts", "max-concurrency", "seed"):
        parser.add_argument(f"--{name}", required=True, type=int)
    parser.add_argument("--random-range-ratio", type=float)
    for name in ("warmup-requests", "ready-check-timeout-sec"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("tokenize-prompt", "disable-tqdm", "cache-report", "output-details"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    if "FAKE_HANG_CLIENT" in os.environ:
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(os.environ["FAKE_PIDS"], "a") as out:
            out.write(f"{os.getpid()} {helper.pid}\n")
        time.sleep(600)
    length = options.random_input_len
    if os.environ.get("FAKE_CLIENT_FAIL") == f"{length}:{options.max_concurrency}":
        sys.exit("ValueError: no tokenizer")
    if os.environ.get("FAKE_CLIENT_DIE") == f"{length}:{options.max_concurrency}":
        os._exit(9)
    print(f"client {os.getpid()}: {' '.join(sys.argv[1:])}")

    def ask(number: int) -> tuple[float, int]:
        body = {"input_ids": [options.seed * 10 + number] * length, **json.loads(options.extra_request_body)}
        request = urllib.request.Request(f"http://{options.host}:{options.port}/generate", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as response:
            answer = json.loads(response.read())
        return answer["meta_info"]["fake_ttft"], answer["meta_info"]["cached_tokens"]

    with ThreadPoolExecutor(options.max_concurrency) as pool:
        answers = list(pool.map(ask, range(options.num_prompts)))
    ttfts, cached = (list(column) for column in zip(*answers, strict=True))
    duration = sum(ttfts) / options.max_concurrency + 0.001
    result = {
        "duration": duration,
        "completed": options.num_prompts,
        "total_input_tokens": length * options.num_prompts,
        "input_throughput": length * options.num_prompts / duration,
        "input_lens": [length] * options.num_prompts,
        "ttfts": ttfts,
        "errors": [""] * options.num_prompts,
        "cached_tokens": cached,
    }
    with open(options.output_file, "a") as out:
        out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    cli_main()

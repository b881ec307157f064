"""Loads a server with inference-perf, and checks what it reports. Run by `run.py`."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

CALLS, PROMPT, OUTPUT = 12, 150, 8
# inference-perf puts this before every prompt.
OPENING = "Pick as many lines as you can from these poem lines:\n"


def exactly(number):
    return dict(min=number, max=number, mean=number, std_dev=0, type="fixed", total_count=CALLS)


def main(url, key, file):
    with tempfile.TemporaryDirectory() as folder:
        # The corpus is as long as a prompt, so that all prompts are equal and hit the cache.
        corpus = Path(folder, "corpus.txt")
        corpus.write_text(("It was a line of a poem, and another one. " * 9)[: PROMPT - len(OPENING)])
        config = dict(
            api=dict(type="completion", streaming=True),
            data=dict(
                type="synthetic", corpus_file_path=str(corpus), input_distribution=exactly(PROMPT),
                output_distribution=exactly(OUTPUT),
            ),
            load=dict(type="concurrent", stages=[dict(num_requests=CALLS, concurrency_level=4)], num_workers=1),
            server=dict(type="vllm", model_name="bundled", base_url=url, api_key=key, ignore_eos=True),
            tokenizer=dict(pretrained_model_name_or_path=str(Path(file).parent / "tokenizer")),
            report=dict(request_lifecycle=dict(summary=True, per_stage=True, per_request=True)),
            storage=dict(local_storage=dict(path=folder)),
        )  # fmt: skip
        # JSON is YAML.
        (Path(folder) / "config.yml").write_text(json.dumps(config))
        command = [str(Path(sys.executable).with_name("inference-perf")), "--config_file", f"{folder}/config.yml"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        (summary,) = (json.loads(path.read_text()) for path in Path(folder).rglob("summary_lifecycle_metrics.json"))
        (each,) = (json.loads(path.read_text()) for path in Path(folder).rglob("per_request_lifecycle_metrics.json"))
    good = summary["successes"]
    assert (good["count"], summary["failures"]["count"]) == (CALLS, 0), summary
    assert good["latency"]["time_to_first_token"]["mean"] > 0
    assert len(each) == CALLS
    for one in each:
        assert one["info"]["response_metrics"]["server_usage"]["completion_tokens"] == OUTPUT, one["info"]
    cached = sum(
        one["info"]["response_metrics"]["server_usage"]["prompt_tokens_details"]["cached_tokens"] for one in each
    )
    assert cached >= 64 * CALLS / 2, "equal prompts did not hit the cache"
    print(
        f"inference-perf {version('inference-perf')}: {CALLS} calls succeeded, {cached} prompt tokens were cached, "
        f"TTFT {1e3 * good['latency']['time_to_first_token']['mean']:.0f} ms"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Loads a server with inference-perf's shared prefixes, and checks what it reports. Run by `run.py`."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

GROUPS, PROMPTS, PREFIX, QUESTION, OUTPUT = 2, 6, 128, 20, 8


def main(url, key, file):
    calls = GROUPS * PROMPTS
    with tempfile.TemporaryDirectory() as folder:
        config = dict(
            api=dict(type="completion", streaming=True),
            data=dict(
                type="shared_prefix",
                shared_prefix=dict(
                    num_groups=GROUPS, num_prompts_per_group=PROMPTS, system_prompt_len=PREFIX, question_len=QUESTION,
                    output_len=OUTPUT,
                ),
            ),
            load=dict(type="concurrent", stages=[dict(num_requests=calls, concurrency_level=4)], num_workers=1),
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
    assert (good["count"], summary["failures"]["count"]) == (calls, 0), summary
    assert good["latency"]["time_to_first_token"]["mean"] > 0
    assert len(each) == calls
    for one in each:
        assert one["info"]["response_metrics"]["server_usage"]["completion_tokens"] == OUTPUT, one["info"]
    cached = sum(
        one["info"]["response_metrics"]["server_usage"]["prompt_tokens_details"]["cached_tokens"] for one in each
    )
    assert cached >= PREFIX * GROUPS, "no shared prefix came from the cache"
    print(
        f"inference-perf {version('inference-perf')}: {calls} calls succeeded, {cached} prompt tokens were cached, "
        f"TTFT {1e3 * good['latency']['time_to_first_token']['mean']:.0f} ms"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

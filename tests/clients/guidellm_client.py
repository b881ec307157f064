"""Loads a server with guidellm, and checks what it reports. Run by `run.py`."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

CALLS, PREFIX, PROMPT, OUTPUT = 12, 96, 24, 8


def main(url, key, file):
    data = dict(kind="synthetic_text", prompt_tokens=PROMPT, output_tokens=OUTPUT)
    data["prefix_buckets"] = [dict(prefix_count=1, prefix_tokens=PREFIX)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [Path(sys.executable).with_name("guidellm"), "run", "--disable-console"]
        command += [
            "--backend",
            f"kind=openai_http,target={url},model=bundled,api_key={key},request_format=/v1/completions",
        ]
        command += ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={CALLS}"]
        command += ["--tokenizer", f"kind=hf_auto,model={Path(file).parent / 'tokenizer'}"]
        command += ["--data", json.dumps(data), "--output", f"kind=json,path={report}"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    failed = [one["info"]["error"] for one in requests["errored"]]
    assert (len(requests["successful"]), failed, requests["incomplete"]) == (CALLS, [], [])
    for one in requests["successful"]:
        assert one["output_metrics"]["text_tokens"] == OUTPUT, one["output_metrics"]
    cached = sum(one["input_metrics"]["cached_tokens"] or 0 for one in requests["successful"])
    assert cached >= 64 * CALLS / 2, "prompts that share a prefix did not hit the cache"
    ttft = benchmark["metrics"]["time_to_first_token_ms"]["successful"]["mean"]
    assert ttft > 0
    print(
        f"guidellm {version('guidellm')}: {CALLS} calls succeeded, {cached} prompt tokens were cached, TTFT {ttft:.0f} ms"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs a task of lm-eval through `local-completions`, and compares its likelihoods with the engine's. Run by `run.py`."""

import json
import math
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import lm_eval
from lm_eval.tasks import TaskManager

HERE = Path(__file__).parent


def main(url, key, file):
    os.environ["OPENAI_API_KEY"] = key
    # The task names its data relative to this folder.
    os.chdir(HERE)
    wanted = json.loads(Path(file).read_text())["likelihoods"]
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=dict(
            model="bundled", base_url=f"{url}/v1/completions", tokenizer=str(Path(file).parent / "tokenizer"),
            tokenizer_backend="huggingface", num_concurrent=4, max_length=512, batch_size=1,
        ),
        tasks=["code"],
        task_manager=TaskManager(include_path=str(HERE / "lm_eval_tasks"), include_defaults=False),
    )  # fmt: skip
    found = [value for sample in results["samples"]["code"] for (value, _) in sample["filtered_resps"]]
    assert len(found) == len(wanted), (found, wanted)
    for own, value in zip(found, wanted, strict=True):
        assert math.isclose(own, value, abs_tol=1e-2), (own, value)
    accuracy = results["results"]["code"]["acc,none"]
    assert accuracy > 0.8, accuracy
    print(f"lm-eval {lm_eval.__version__}: {len(found)} likelihoods are the engine's; accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

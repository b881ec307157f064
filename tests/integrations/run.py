"""Runs this library inside other people's stacks: `make integrations SGLANG_JAX=DIR`, with DIR a clone of sglang-jax.

A tiny random Qwen3.5 and a tiny random Kimi Linear are each served by sglang-jax's engine three times: with its own
linear-attention backend, with ours, and with ours and speculative decoding. All must answer the same tokens with the same
cache hits, and the tokens must be right by this library's float32 reference. Ours also serves with the heads divided among
two simulated devices. Then sglang-jax's own tests of its backends run on ours. sglang-jax has an environment of its own in
build/integrations, because it pins its packages and needs Python 3.12; `--python` names another one.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import tiny_kimi_linear
import tiny_qwen3_5

from mamba_align_jax.engine.reference import Reference
from mamba_align_jax.models import load_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "integrations"
VERSIONS = (
    "import sys, jax, flax, numpy; print(sys.version.split()[0], jax.__version__, flax.__version__, numpy.__version__)"
)
MODELS = dict(gdn=tiny_qwen3_5, kda=tiny_kimi_linear)
DEVICES = 2
# sglang-jax's own tests that need one device. Those of KDA take a quarter of an hour, most of it in their reference.
TESTS = "sgl_jax.test.test_gdn_attention", "sgl_jax.test.test_kda_attention"
ON_OURS = """
import sys, unittest
from mamba_align_jax.integrations import sglang_jax
sglang_jax.install()
from sgl_jax.test import test_gdn_attention, test_kda_attention
assert (test_gdn_attention.GDNAttnBackend, test_kda_attention.KDAAttnBackend) == sglang_jax.backends()
unittest.main(module=None, argv=sys.argv)
"""


def newer_python():
    """Finds Python 3.12. A shim of pyenv may exist for an interpreter that is not selected, so it has to run."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in (shutil.which("python3.12"), *sorted(root.glob("3.12.*/bin/python3.12"), reverse=True)):
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    raise SystemExit("integrations: no python3.12 found, which the other stacks run on")


def environment(stack):
    """Makes a stack's environment unless its requirements are those of the last time. Returns its Python."""
    requirements = HERE / f"{stack}.txt"
    wanted, folder = requirements.read_text(), BUILD / stack
    stamp = folder / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([newer_python(), "-m", "venv", folder], check=True)
        command = [folder / "bin/python", "-m", "pip", "install", "--quiet", "-r", requirements]
        subprocess.run(command, check=True)
        stamp.write_text(wanted)
    return folder / "bin" / "python"


def judge(reference, answers):
    """Counts the answers of a phase, those from the cache, and the tokens that the reference calls wrong."""
    verdicts = [reference.judge(answer["prompt"], answer["tokens"]) for answer in answers]
    hits = sum(answer["cached"] > 0 for answer in answers)
    wrong, ties = sum(verdict.wrong for verdict in verdicts), sum(verdict.ties for verdict in verdicts)
    tokens = sum(verdict.num_tokens for verdict in verdicts)
    return f"{len(answers)} prompts, {hits} hits, {tokens} tokens, {ties} ties, {wrong} wrong", wrong


def check(kind, run, say):
    """Serves a model in all ways. Returns the names of those whose answers are wrong or other ones."""
    model = MODELS[kind].write(BUILD / MODELS[kind].__name__)
    reference, failed, found = Reference(load_model(str(model), dtype="float32")), [], {}

    def serve(backend, setting, *more, **variables):
        """Runs an engine. Returns its answers by phase, and counts of drafts as a text."""
        options = [*more] if backend != "drafts" else [*more, "--rehearsed", BUILD / f"{kind}_ours_{setting}.json"]
        answers = BUILD / f"{'_'.join((kind, backend, setting, *more)).replace('-', '')}.json"
        run(answers.stem, HERE / "sglang_jax_server.py", model, answers, backend, setting, *options, **variables)
        served = json.loads(answers.read_text())
        counts, devices = served["drafts"], DEVICES if "--devices" in more else 1
        # Nothing is retracted or aborted unless it is asked for, and without a radix cache there are no boundaries.
        wanted = [name for name in counts if "--abort" in more or not name.startswith(("retracted", "aborted"))]
        wanted = [name for name in wanted if setting != "batched" or "boundary" not in name]
        failed.extend(name for name in wanted if backend == "drafts" and counts[name] == 0)
        failed.extend(name for name, right in (("devices", devices), ("remembered", 0)) if served[name] != right)
        return served["answers"], ", ".join(f"{count} {name}" for name, count in counts.items())

    for setting in ("cached", "batched", "both"):
        native, ours, drafts = (serve(backend, setting) for backend in ("native", "ours", "drafts"))
        found[setting] = ours[0]
        for phase, answers in ours[0].items():
            text, wrong = judge(reference, answers)
            others = [
                name for name, (served, _) in (("native", native), ("drafts", drafts)) if served[phase] != answers
            ]
            same = f"other ones with {' and '.join(others)}" if others else "the same with native and with drafts"
            say(f"{setting}, {phase}: {text}; tokens and hits are {same}")
            failed += [phase] * (wrong > 0 or bool(others))
        say(f"{setting}, drafts: {drafts[1]}")
    for backend, setting in (("ours", "cached"), ("ours", "both"), ("drafts", "both")):
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
        divided, _ = serve(backend, setting, "--devices", str(DEVICES), XLA_FLAGS=flags)
        same = divided == found[setting]
        say(f"{setting}, {backend} on {DEVICES} devices: tokens and hits are {'the same' if same else 'other ones'}")
        failed += ["devices"] * (not same)
    retracted, counts = serve("drafts", "both", "--abort", SGLANG_TEST_RETRACT="1")
    tokens = lambda served: [[answer["tokens"] for answer in phase] for phase in served.values()]
    same = tokens(retracted) == tokens(found["both"])
    say(f"both, requests retracted in every third step: {counts}; tokens are {'the same' if same else 'other ones'}")
    return failed + ["retracted"] * (not same)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sglang_jax", type=Path, help="a clone of sglang-jax")
    parser.add_argument("--python", help="the Python of an environment that has sglang-jax's packages")
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS, help="the models to serve")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="sglang-jax's tests to run on our backends")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    python, begin = options.python or environment("sglang_jax"), time.monotonic()
    say = lambda text: print(f"{time.monotonic() - begin:4.0f} s: {text}", flush=True)
    out = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    say(f"sglang-jax {out('git', '-C', options.sglang_jax, 'log', '-1', '--format=%H of %cs')}")
    say(f"Python, JAX, flax, NumPy: {out(python, '-c', VERSIONS)}, on a CPU")
    env = os.environ | {
        "PYTHONPATH": f"{options.sglang_jax / 'python'}:{ROOT}",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(BUILD / "programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def run(name, *command, **variables):
        with (BUILD / f"{name}.log").open("w") as log:
            done = subprocess.run(
                [python, *command], env=env | variables, stdout=log, stderr=log, check=False
            ).returncode
        if done != 0:
            raise SystemExit(f"{name} failed:\n{(BUILD / f'{name}.log').read_text()[-3000:]}")

    failed = []
    for name in options.models:
        failed += check(name, run, lambda text, name=name: say(f"{name}, {text}"))
    for test in options.tests:
        run(test, "-c", ON_OURS, test)
        count = (BUILD / f"{test}.log").read_text().rpartition("Ran ")[2].partition(" tests")[0]
        say(f"{test}: {count} tests of sglang-jax pass on our backends")
    if failed:
        raise SystemExit(f"integrations: failed: {', '.join(failed)}")
    say("all answers are right")


if __name__ == "__main__":
    sys.exit(main())

"""Runs real clients against `mamba-align serve` on the bundled model: `make clients`.

Each client has a virtual environment of its own in build/clients, because their pins clash. The project's own Python first
writes what the engine answers (`answers.py`), with which the clients compare what the server says. Nothing is skipped: what
is missing is a failure.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from answers import SIZES

from mamba_align_jax.data import BYTE_MODEL

HERE, KEY = Path(__file__).parent, "key-of-the-clients"
BUILD = HERE.parents[1] / "build" / "clients"
# Clients, and whether they need a Python newer than the oldest of the project.
CLIENTS = {
    "openai": False, "anthropic": False, "agents": False, "lm_eval": True, "inference_perf": True, "guidellm": False,
}  # fmt: skip


def newer_python():
    """Finds Python 3.12. A shim of pyenv may exist for an interpreter that is not selected, so it has to run."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in (shutil.which("python3.12"), *sorted(root.glob("3.12.*/bin/python3.12"), reverse=True)):
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(path)
    raise SystemExit("clients: no python3.12 found, which lm-eval and inference-perf run on")


def environment(name, python):
    """Makes a client's environment unless its requirements are those of the last time. Returns its Python."""
    folder, requirements = BUILD / name, HERE / f"{name}.txt"
    stamp, wanted = folder / "requirements.txt", f"{python}\n{requirements.read_text()}"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin/python", "-m", "pip", "install", "--quiet", "-r", requirements], check=True)
        stamp.write_text(wanted)
    return folder / "bin" / "python"


def make_tokenizer():
    """Writes the bundled tokenizer as transformers reads it without a model. Returns its folder."""
    folder = BUILD / "tokenizer"
    folder.mkdir(exist_ok=True)
    shutil.copy(BYTE_MODEL / "tokenizer.json", folder)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "\0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@contextlib.contextmanager
def server():
    """Runs the server on a free port. Yields its address. It must hold nothing in the end, and have logged no error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    command = [sys.executable, "-m", "mamba_align_jax", "serve", "--dtype=float32", f"--port={port}", "--warmup=none"]
    url, log = f"http://127.0.0.1:{port}", BUILD / "server.log"
    with log.open("w") as file:
        command += [f"--chat-template={HERE / 'chat_template.jinja'}"]
        command += [f"--api-key={KEY}", "--served-model-name=bundled", *options]
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        wait_until_ready(process, url)
        yield url
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode().splitlines()
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "mamba_align:state_blocks_used"):
            (value,) = (line.rpartition(" ")[2] for line in metrics if line.startswith(name + "{"))
            assert float(value) == 0, f"{name} is {value} after all clients"
        process.terminate()
        process.wait(60)
        assert "Traceback" not in log.read_text(), log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()


def wait_until_ready(process, url):
    while process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5):
            return
        time.sleep(0.2)
    raise SystemExit(f"clients: the server has not started: {(BUILD / 'server.log').read_text()[-3000:]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CLIENTS, action="append", help="run this client only; may be repeated")
    parser.add_argument("--install", action="store_true", help="make the environments, and end")
    options = parser.parse_args()
    begin = time.monotonic()
    say = lambda text: print(f"{time.monotonic() - begin:.0f} s: {text}", flush=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    make_tokenizer()
    newer = newer_python()
    chosen = options.only or CLIENTS
    pythons = {name: environment(name, newer if CLIENTS[name] else sys.executable) for name in chosen}
    say("the environments are ready")
    if options.install:
        return
    # The engine here and the one that is served have the same programs.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(BUILD / "programs"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    answers = BUILD / "answers.json"
    subprocess.run([sys.executable, HERE / "answers.py", answers], check=True)
    say("the engine has answered")
    with server() as url:
        for name, python in pythons.items():
            subprocess.run([python, HERE / f"{name}_client.py", url, KEY, answers], check=True)
            say(f"{name} is done")
    say("all clients agree with the engine")


if __name__ == "__main__":
    main()

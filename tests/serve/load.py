"""Hundreds of clients at once, many of them rude, against `mamba-align serve`: `make soak-serve`.

Polite clients stream answers, every token of which the float32 reference judges. Rude ones vanish, stall, send garbage, too
much, broken UTF-8 or half a call, or have no key. Whatever is refused must have a status and a reason. Afterwards the server
must hold nothing, answer as before, and have about the memory that it had early in the load.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from mamba_align_jax.data import BYTE_MODEL, encode
from mamba_align_jax.engine.reference import Reference
from mamba_align_jax.models import load_model

KEY, MODEL = "key-of-the-load-test", "bundled"
LIMITS = dict(limit_receive_s=3, limit_send_s=5, limit_body_bytes=200_000, limit_connections=1024)
SIZES = dict(max_num_seqs=8, max_model_len=512, max_waiting=48, mamba_block_size=64, num_state_blocks=200)
SIZES |= dict(num_kv_pages=600, max_num_batched_tokens=128, max_prefill_rows=4)
OUTPUT = 16
# Statuses that a server may answer to a call that is right, because it has too much to do.
BUSY = (429, 503)
MAX_GROWTH_MB = 100


def make_prompts(rng, count):
    """Draws prompts of tokens. Many of them begin alike, and some continue others."""
    text = encode(Path(argparse.__file__).read_text())
    prompts = []
    for _ in range(count):
        start = 2000 * rng.randrange(4)
        shared = text[start : start + rng.choice((40, 64, 130, 200, 256))]
        other = rng.randrange(len(text) - 100)
        prompts.append(shared + text[other : other + rng.randrange(1, 80)])
    return prompts


@dataclass
class Seen:
    """What all clients have seen. `answers` are (prompt, tokens) of streams that ended."""

    finished: int = 0
    refused: Counter = field(default_factory=Counter)
    rude: Counter = field(default_factory=Counter)
    answers: set = field(default_factory=set)
    faults: list = field(default_factory=list)

    def expect(self, condition, fault):
        if not condition:
            self.faults.append(str(fault)[:500])


class Call:
    """A connection, with the little of HTTP that a client needs."""

    def __init__(self, port):
        self.port = port

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *error):
        self.writer.transport.abort()

    async def send(self, body, key=KEY, path="/v1/completions", length=None):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self.writer.write(
            f"{head}authorization: Bearer {key}\r\ncontent-length: {length or len(content)}\r\n\r\n".encode() + content
        )
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def head(self):
        """Reads the head of the answer, and returns its status and its headers."""
        first, *rest = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in rest if line)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def refusal(self):
        """Reads an answer that must be a refusal, and returns its status. Its body must have a reason."""
        status, headers = await self.head()
        body = await self.reader.readexactly(int(headers["content-length"]))
        error = json.loads(body)["error"]
        assert status >= 400, body
        assert error["message"], body
        assert error["type"], body
        return status

    async def events(self):
        """Yields the events of a stream until its end."""
        rest = b""
        while size := int(await self.reader.readline(), 16):
            rest += (await self.reader.readexactly(size + 2))[:-2]
            *events, rest = rest.split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    return
                yield json.loads(event.removeprefix(b"data: "))
        raise AssertionError("the stream has no end")


def ask(prompt, **fields):
    return (
        dict(prompt=prompt, max_tokens=OUTPUT, temperature=0, ignore_eos=True, stream=True, return_token_ids=True)
        | fields
    )


async def polite(call, prompt, seen, patience=0.0):
    """Streams an answer. With `patience`, it stops reading for so many seconds in the middle."""
    await call.send(ask(prompt, stream_options={"include_usage": True}, cache_salt=random.choice(("", "", "other"))))
    status, headers = await call.head()
    if status != 200:
        body = json.loads(await call.reader.readexactly(int(headers["content-length"])))
        seen.expect(status in BUSY and body["error"]["message"], f"{status} {body}")
        seen.refused[status] += 1
        return await asyncio.sleep(0.2)
    tokens, usage, end = [], None, None
    async for event in call.events():
        seen.expect("error" not in event, event)
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            tokens += choice["token_ids"]
            end = choice["finish_reason"] or end
        if patience and len(tokens) > 3:
            await asyncio.sleep(patience)
            patience = 0
    seen.expect((len(tokens), end) == (OUTPUT, "length"), f"{len(tokens)} tokens, {end}")
    seen.expect(usage and usage["completion_tokens"] == OUTPUT and usage["prompt_tokens"] == len(prompt), usage)
    seen.answers.add((tuple(prompt), tuple(tokens)))
    seen.finished += 1


async def vanishing(call, prompt, seen):
    await call.send(ask(prompt, max_tokens=200))
    if random.random() < 0.7:
        await call.head()
        for _ in range(random.randrange(4)):
            await call.reader.readline()


async def stalling(call, prompt, seen):
    await polite(call, prompt, seen, patience=random.uniform(1, 4))


async def half_open(call, prompt, seen):
    """Sends a part of a call, and nothing more. The server says that it is late."""
    body = json.dumps(ask(prompt)).encode()
    if random.random() < 0.5:
        call.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost")
    else:
        await call.send(body[:20], length=len(body))
    seen.expect(await call.refusal() == 408, "half a call was not refused by 408")


async def leaving_early(call, prompt, seen):
    body = json.dumps(ask(prompt)).encode()
    await call.send(body[:20], length=len(body))
    call.writer.write_eof()
    with contextlib.suppress(asyncio.IncompleteReadError):
        await call.refusal()


async def garbage(call, prompt, seen):
    call.writer.write(random.randbytes(random.randrange(20, 300)) + b"\r\n\r\n")
    seen.expect(await call.refusal() == 400, "garbage was not refused by 400")


async def refused(call, seen, wanted, body, **options):
    await call.send(body, **options)
    status = await call.refusal()
    seen.expect(status == wanted, f"{status} instead of {wanted} for {body[:80]}")


async def oversize(call, prompt, seen):
    await refused(call, seen, 413, b'{"prompt": "' + b"a" * 300_000 + b'"}')


async def oversize_by_its_head(call, prompt, seen):
    await refused(call, seen, 413, b"{", length=10**12)


async def malformed(call, prompt, seen):
    bodies = (b'{"prompt": "\xff\xfe"}', b'{"prompt": "a', b"[]", b'{"prompt": [1e9]}', b'{"prompt": "a", "n": 10000}')
    await refused(call, seen, 400, random.choice(bodies))


async def too_long(call, prompt, seen):
    await refused(call, seen, 400, json.dumps(ask(prompt * 40)).encode())


async def keyless(call, prompt, seen):
    await refused(call, seen, 401, json.dumps(ask(prompt)).encode(), key=random.choice(("", "wrong", KEY + "x")))


RUDE = (vanishing, vanishing, stalling, half_open, leaving_early, garbage, oversize, oversize_by_its_head, malformed)
RUDE += (too_long, keyless)


async def client(port, prompts, seen, goes_on):
    """Calls again and again, rudely one time in four."""
    while goes_on():
        act = random.choice(RUDE) if random.random() < 0.25 else polite
        try:
            async with asyncio.timeout(600), Call(port) as call:
                await act(call, random.choice(prompts), seen)
        except (OSError, asyncio.IncompleteReadError) as error:
            # A client that sends more than is read may find the connection reset before it reads the refusal, and one
            # that stalls may lose it.
            allowed = (oversize, oversize_by_its_head, stalling, vanishing, leaving_early, garbage)
            seen.expect(act in allowed, f"{act.__name__}: {error!r}")
            seen.rude["connection lost"] += 1
        except Exception as error:
            seen.expect(False, f"{act.__name__}: {error!r}")
        if act is not polite:
            seen.rude[act.__name__] += 1


async def run_clients(port, prompts, seen, streams, seconds, enough=lambda: True):
    """Runs `streams` clients for so many seconds, and longer until `enough()` is true, at most ten times as long."""
    began = time.monotonic()

    def goes_on():
        lasted = time.monotonic() - began
        return lasted < seconds or (not enough() and lasted < 10 * seconds)

    await asyncio.gather(*(client(port, prompts, seen, goes_on) for _ in range(streams)))


def compile_programs(port, prompts):
    """Calls with so many clients at once that the engine runs each of its programs."""
    seen = Seen()
    for streams in (1, 4, 8):
        asyncio.run(_together(port, prompts[:streams], seen))
    assert not seen.faults, seen.faults


async def _together(port, prompts, seen):
    async def one(prompt):
        async with Call(port) as call:
            await polite(call, prompt, seen)

    await asyncio.gather(*map(one, prompts))


def metrics(port):
    """Returns the server's metrics by their names, added over their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    found = Counter()
    for line in lines:
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] += float(value)
    return found


def leaked(port, patience=60):
    """Waits until nothing runs, and returns how many state blocks are still held, and the share of pages that are."""
    end = time.monotonic() + patience
    while True:
        found = metrics(port)
        busy = found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]
        held = found["mamba_align:state_blocks_used"] + found["vllm:kv_cache_usage_perc"]
        if busy + held == 0 or time.monotonic() > end:
            return busy + held
        time.sleep(0.2)


def judge(answers, model):
    """Returns how many streams have a token that is wrong for the model, and how many tokens are ties."""
    reference = Reference(model)
    verdicts = [reference.judge(prompt, tokens) for prompt, tokens in answers]
    return sum(not verdict.right for verdict in verdicts), sum(verdict.ties for verdict in verdicts)


def memory_mb(process):
    with open(f"/proc/{process}/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


@contextlib.contextmanager
def server():
    """Runs `mamba-align serve` on the bundled model in a process of its own. Yields the process, its port and its log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in (SIZES | LIMITS).items()]
    command = [
        sys.executable,
        "-m",
        "mamba_align_jax",
        "serve",
        "--dtype=float32",
        f"--port={port}",
        f"--api-key={KEY}",
    ]
    # All prompts are greedy, so half of the programs are never needed. Compiling them quickly makes them a little slower.
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | os.environ
    with tempfile.NamedTemporaryFile("w", prefix="mamba-align-serve-", suffix=".log", delete=False) as log:
        command += [f"--served-model-name={MODEL}", "--warmup=none", *options]
        process = subprocess.Popen(command, env=quick, stdout=log, stderr=log)
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                break
            time.sleep(0.2)
        assert process.poll() is None, f"the server has not started: {log.name}"
        yield process, port, log.name
        process.terminate()
        assert process.wait(60) in (0, -15), f"the server ended with {process.returncode}"
    finally:
        process.kill()
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    prompts, seen = make_prompts(random.Random(options.seed), 96), Seen()
    begin = time.monotonic()
    say = lambda text: print(f"{time.monotonic() - begin:.0f} s: {text}", flush=True)
    with server() as (process, port, log):
        say("the server runs")
        compile_programs(port, prompts)
        say("its programs are compiled")
        # What the allocator keeps after the first burst is not a leak, so the memory is compared after that.
        asyncio.run(run_clients(port, prompts, seen, options.streams, options.seconds / 4))
        early = memory_mb(process.pid)
        say(f"{seen.finished} streams have ended")
        asyncio.run(run_clients(port, prompts, seen, options.streams, options.seconds * 3 / 4))
        late, lost = memory_mb(process.pid), leaked(port)
        refusals = metrics(port)["mamba_align:refused_calls_total"]
    # No client may make the server log an error.
    seen.expect("Traceback" not in Path(log).read_text(), f"there are errors in {log}")
    say(f"{seen.finished} streams have ended, {len(seen.answers)} different ones are judged")
    wrong, ties = judge(seen.answers, load_model(BYTE_MODEL, "float32"))
    print(f"rude: {dict(seen.rude)}; busy: {dict(seen.refused)}; refused calls by the server's count: {refusals:.0f}")
    for fault in sorted(set(seen.faults)):
        print(f"fault: {fault}")
    print(
        f"streams={options.streams} finished={seen.finished} different={len(seen.answers)} wrong={wrong} ties={ties} "
        f"leaked={lost:g} faults={len(seen.faults)} memory={early:.0f}..{late:.0f} MB"
    )
    is_right = seen.finished and not wrong and not lost and not seen.faults and late - early < MAX_GROWTH_MB
    return 0 if is_right else 1


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())

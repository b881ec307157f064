"""What any router in front of replicas must do: hits stay with the replica that has the state, and no call is lost."""

import http.client
import itertools
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

from fleets import MODEL, metric, opened, read, wait_for

CHATS = ("What is a module?", "Tell me about lists.", "How do files work?", "Why are there classes?")
BLOCK = 64
ROUNDS = 6  # of conversations, at most: a router may send all of one round to one replica by chance


def ask(fleet, messages, max_tokens):
    body = dict(model=MODEL, messages=messages, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    answer = json.loads(read(f"{fleet.url}/v1/chat/completions", body))
    return answer["choices"][0]["message"]["content"], answer["usage"]


class Conversation:
    """Some turns of a user and the model."""

    def __init__(self, fleet, opening):
        self.fleet, self.opening, self.messages, self.usages = fleet, opening, [], []

    def go_on(self, turns):
        """Has further turns. Returns the usage of every turn so far."""
        for _ in range(turns):
            question = f"{self.opening} " * 4 + f"This is question {len(self.usages)}."
            self.messages.append(dict(role="user", content=question))
            text, usage = ask(self.fleet, self.messages, 12)
            self.messages.append(dict(role="assistant", content=text))
            self.usages.append(usage)
        return self.usages


def converse_all(fleet, name, number):
    """Has several conversations of three turns, which share no beginning. Returns the usages of each.

    A router that knows no prefix of a call may send it where fewer calls run, or where it has sent less before. So the
    conversations of a round with an even number begin together, and the others one after the other.
    """
    conversations = [Conversation(fleet, f"{place}{number} {name}: {chat}") for place, chat in enumerate(CHATS)]
    if number % 2:
        for conversation in conversations:
            conversation.go_on(1)
    with ThreadPoolExecutor(len(CHATS)) as pool:
        rest = 2 if number % 2 else 3
        return list(pool.map(lambda conversation: conversation.go_on(rest), conversations))


def hits_stay(fleet):
    """Each turn after the first starts from the states of the last one, whichever replica has them."""
    # The replica that has the first conversation compiles most programs, and the other one reads them from the cache.
    Conversation(fleet, "Is anyone there?").go_on(3)
    before = fleet.replicas()
    calls = cached = 0
    for number in range(ROUNDS):
        conversations = converse_all(fleet, "First", number)
        for usages in conversations:
            for last, usage in itertools.pairwise(usages):
                kept = usage["prompt_tokens_details"]["cached_tokens"]
                assert kept >= last["prompt_tokens"] // BLOCK * BLOCK > 0, (kept, last, usage)
        calls += sum(map(len, conversations))
        cached += sum(usage["prompt_tokens_details"]["cached_tokens"] for usages in conversations for usage in usages)
        after = fleet.replicas()
        assert after.keys() == before.keys(), (list(before), list(after))
        grown = lambda name, after=after: [metric(after[one], name) - metric(before[one], name) for one in after]
        served, hits = grown("vllm:request_success_total"), grown("vllm:prefix_cache_hits_total")
        assert sum(served) == calls, served
        assert sum(hits) == cached, (hits, cached)
        if min(served) > 0:
            assert min(hits) > 0, hits
            return f"calls by replica {served}, cached tokens by replica {hits}"
    raise AssertionError(f"one replica served everything: {served}")


def whole(fleet, prompt, max_tokens):
    body = dict(model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return json.loads(read(f"{fleet.url}/v1/completions", body))["choices"][0]["text"]


def stream(fleet, prompt, max_tokens):
    """Streams a completion. Returns its text as far as it came, and whether it came to its end."""
    body = dict(model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, stream=True)
    text = ""
    with opened(f"{fleet.url}/v1/completions", body) as answer:
        try:
            for line in answer:
                if line.strip() == b"data: [DONE]":
                    return text, True
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "choices" not in event:
                        break
                    text += event["choices"][0]["text"]
        except (OSError, http.client.HTTPException):
            pass
    return text, False


def a_death_loses_nothing(fleet):
    """While clients call without a pause, a replica is killed and comes back. Only streams that had begun may break."""
    stop, length = threading.Event(), 40
    prompts = [f"{chat} Second. " * 3 for chat in CHATS]

    def keep_asking(prompt):
        texts = [whole(fleet, prompt, length)]
        while not stop.is_set():
            texts.append(whole(fleet, prompt, length))
        assert len(set(texts)) == 1, texts
        return len(texts)

    def keep_streaming(prompt, wanted):
        found = []
        while not stop.is_set():
            text, is_whole = stream(fleet, prompt, length)
            assert text == wanted if is_whole else text and wanted.startswith(text), (text, wanted, is_whole)
            found.append(is_whole)
        assert found.count(False) <= 1, found
        return len(found), found.count(False)

    wanted = whole(fleet, prompts[0], length)
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        try:
            asking = [pool.submit(keep_asking, prompt) for prompt in prompts]
            streaming = pool.submit(keep_streaming, prompts[0], wanted)
            running = lambda text: metric(text, "vllm:num_requests_running") + metric(text, "vllm:num_requests_waiting")
            # The busiest replica dies while it has calls.
            before = wait_for("calls at a replica", lambda: busy(fleet, running))
            victim = max(before, key=lambda process: running(before[process]))
            os.kill(victim, signal.SIGKILL)
            back = wait_for("the replica's return", lambda: fleet.is_whole() and returned(fleet, before))
        finally:
            stop.set()
        answered = sum(one.result() for one in asking)
        streams, broken = streaming.result()
    (new,) = back
    for number in range(ROUNDS):
        converse_all(fleet, "Third", number)
        served = metric(fleet.replicas()[new], "vllm:request_success_total")
        if served > 0:
            break
    assert served > 0, "the replica that came back gets no calls"
    return (
        f"process {victim} died with {running(before[victim]):.0f} calls; all {answered} calls were answered; of {streams} "
        f"streams {broken} broke after they had begun; process {new} has answered {served:.0f} since"
    )


def busy(fleet, running):
    """Returns the replicas if one of them has several calls."""
    found = fleet.replicas()
    return len(found) == 2 and max(map(running, found.values())) > 1 and found


def returned(fleet, before):
    """Returns the processes that are new."""
    return fleet.replicas().keys() - before.keys()

"""The options of `mamba-align serve` for cache events. Imports no ZMQ before an option asks for it."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from mamba_align_jax.errors import FieldError


def add_event_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    events = parser.add_argument_group(
        "cache events",
        "ZMQ addresses, as tcp://127.0.0.1:5557. Whoever reads from one learns the tokens of all prompts.",
    )
    add = events.add_argument
    add("--kv-events", metavar="ADDRESS", help="publish stored and removed pages here, in vLLM's schema")
    add("--kv-events-replay", metavar="ADDRESS", help="send again here what a reader of --kv-events has missed")
    add("--state-events", metavar="ADDRESS", help="publish pages and states here, in one order")
    add("--state-events-replay", metavar="ADDRESS", help="send again here what a reader of --state-events has missed")
    text = "readers listen at these addresses, and the server connects"
    add("--events-connect", action=argparse.BooleanOptionalAction, default=False, help=text)
    add("--events-topic", default="", metavar="TEXT", help="the topic of the messages, as kv@POD@MODEL; default: none")


@contextlib.contextmanager
def event_listener(options: argparse.Namespace) -> Iterator[Callable[[tuple[Any, ...]], None] | None]:
    """Opens the sockets that the options ask for. Yields what publishes the events of an engine, or None.

    Raises:
        ValueError: An address can't be opened or is there without the one that it belongs to, or the extra "events" is not
            installed.
    """
    for name in ("kv_events", "state_events"):
        if getattr(options, f"{name}_replay") is not None and getattr(options, name) is None:
            alone = f"{getattr(options, f'{name}_replay')!r} alone"
            raise FieldError(f"{name}_replay", f"come with {name}", alone, "must")
    if options.kv_events is None and options.state_events is None:
        yield None
        return
    try:
        from mamba_align_jax.serve.events.publisher import EventPublisher
    except ImportError as error:
        raise ValueError(
            f"cache events need the extra 'events' (pip install 'mamba-align-jax[serve,events]'): {error}"
        ) from error
    with contextlib.ExitStack() as stack:
        publishers = []
        for name, states in (("kv_events", False), ("state_events", True)):
            endpoint, replay = getattr(options, name), getattr(options, f"{name}_replay")
            if endpoint is not None:
                how = dict(states=states, connect=options.events_connect, topic=options.events_topic)
                with _named_by_options(name):
                    publisher = EventPublisher(endpoint, replay, **how)
                stack.callback(publisher.close)
                publishers.append(publisher)

        def publish(events: tuple[Any, ...]) -> None:
            for publisher in publishers:
                publisher.publish(events)

        yield publish


@contextlib.contextmanager
def _named_by_options(name: str) -> Iterator[None]:
    """Names the option where `EventPublisher` names the argument that has its value."""
    names = {"endpoint": name, "replay_endpoint": f"{name}_replay", "topic": "events_topic"}
    try:
        yield
    except FieldError as error:
        raise error.renamed("--" + names[error.field].replace("_", "-")) from error

"""The command `mamba-align serve`: its options, and what it does. Imports no server library before it runs."""

import argparse
import gc
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mamba_align_jax import _values as values
from mamba_align_jax._options import add_fields, given_fields
from mamba_align_jax.engine.config import EngineConfig
from mamba_align_jax.engine.text.chat_template import ChatTemplate, load_chat_template
from mamba_align_jax.errors import FieldError
from mamba_align_jax.serve.events.options import add_event_options, event_listener
from mamba_align_jax.serve.settings import WARMUPS, Limits, Settings
from mamba_align_jax.serve.vllm_flags import NAMES, add_parser_options, add_vllm_options, fields_of

# What serves many clients best where it is not the engine's own default.
_DEFAULTS = {"max_waiting": 1024}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options, other than the model's directory."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="the address to listen at; 0.0.0.0 is all (default: %(default)s)")
    add("--port", type=int, default=8000, help="the port; 0 takes a free one (default: %(default)s)")
    text = "another name by which clients call the server, as its proxy's; without any, a server that listens on more than "
    text += "this machine takes all names"
    add("--allowed-host", nargs="+", action="extend", default=[], metavar="HOST", help=text)
    text = "the model's names in the API, of which answers have the first; default: ORG/NAME, or its directory's"
    add("--served-model-name", nargs="+", metavar="NAME", help=text)
    add("--api-key", nargs="+", action="extend", default=[], metavar="KEY", help="keys that clients may have")
    add("--api-key-file", type=Path, metavar="FILE", help="a file with a key in each line")
    text = "a file with an administrator's key in each line; without it POST /reset_prefix_cache does not exist"
    add("--admin-key-file", type=Path, metavar="FILE", help=text)
    add_dtype(parser)
    text = "a file with a chat template, or the template itself; default: the model's own"
    add("--chat-template", metavar="FILE", help=text)
    add_parser_options(add)
    text = "draws the seeds of calls that have none; default: numbers that nobody can guess"
    add("--seed", type=int, metavar="N", help=text)
    text = (
        "where fields come from that a call leaves out: the model's generation_config.json (auto), or neutral values "
    )
    text += "(neutral, or vllm, as vLLM calls it) (default: %(default)s)"
    add("--generation-config", choices=("auto", "neutral", "vllm"), default="auto", help=text)
    add(
        "--min-priority",
        type=int,
        default=0,
        metavar="N",
        help="the smallest priority number that a client may ask for",
    )
    text = "what is compiled before calls are taken: the usual programs, those for penalties and log-probabilities as well "
    text += "(full), or none (default: %(default)s)"
    add("--warmup", choices=WARMUPS, default="usual", help=text)
    text = "the cached prefixes are saved in this directory when the server stops, and taken from it when it starts"
    add("--save-cache", type=Path, metavar="DIR", help=text)
    add("--access-log", action=argparse.BooleanOptionalAction, default=False, help="log each call")
    engine = parser.add_argument_group("engine")
    add_engine_options(engine)
    text = "the number of this host's devices that share the model (default: 1)"
    engine.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N", help=text)
    add_event_options(parser)
    add = parser.add_argument_group("several processes", "one engine over the devices of all of them").add_argument
    add("--coordinator", metavar="HOST:PORT", help="the address of process 0, which serves; the others work for it")
    add("--num-processes", type=int, metavar="N", help="the number of processes")
    add("--process-id", type=int, metavar="I", help="the number of this process, from 0 on")
    add("--local-device-ids", type=int, nargs="+", metavar="N", help="this process's devices of the host; default: all")
    add_fields(parser.add_argument_group("limits"), Limits, prefix="limit_")


def add_engine_options(group: argparse._ArgumentGroup) -> None:
    """Adds the options of which `make_config` makes an EngineConfig."""
    add_fields(group, EngineConfig, defaults=_DEFAULTS, names=NAMES)
    add_vllm_options(group.add_argument)


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a model's dtypes."""
    dtypes = ("auto", "float32", "bfloat16", "float16")
    text = (
        "the dtype of weights and activations; auto is that of config.json or else of the weights, and float32 on a CPU"
    )
    parser.add_argument("--dtype", choices=dtypes, default="auto", help=text)
    add_weights_dtype(parser)
    text = (
        "to what products round the inputs of weights that stay FP8: fp8, or bfloat16, which leaves them as they are "
    )
    text += "(default: as the files say)"
    parser.add_argument("--activation-dtype", choices=("bfloat16", "fp8"), help=text)


def add_weights_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds the option of how weights lie in memory: see `load_model`."""
    text = "how weights lie in memory: those that are FP8 in the files as they are (file), others in FP8 too (fp8), or all "
    text += "of them in the model's dtype (bfloat16) (default: %(default)s)"
    parser.add_argument("--weights-dtype", choices=("file", "bfloat16", "fp8"), default="bfloat16", help=text)


def run(options: argparse.Namespace, load: Callable[[EngineConfig], Any]) -> int:
    """Serves a model until the process is told to stop, and returns the exit status.

    Args:
        options: The options, with the model's directory as `model` and its name as `model_name`.
        load: Makes an engine.

    Raises:
        ValueError: An option has a wrong value.
        OSError: A file can't be read.
    """
    try:
        import uvicorn

        from mamba_align_jax.serve.app import create_app
        from mamba_align_jax.serve.server import make_server
        from mamba_align_jax.serve.server import run as run_server
    except ImportError as error:
        raise ValueError(f"serve needs the extra 'serve' (pip install 'mamba-align-jax[serve]'): {error}") from error
    settings = make_settings(options)
    # Sockets take a larger number for another one.
    values.integer("port", options.port, 0, 2**16 - 1)
    config, template = make_config(options), make_template(options)
    if options.save_cache is not None:
        mode = config.prefix_cache
        values.require(mode != "none", NAMES["prefix_cache"], "'align' or 'all' with --save-cache", mode)
        options.save_cache.mkdir(parents=True, exist_ok=True)
    with event_listener(options) as listener:
        engine = load(config)
        if listener is not None:
            # Before anything is cached, because a new listener empties the cache.
            engine.on_cache_event(listener)
        directory: Path | None = options.save_cache
        if directory is not None and not restore_cache(engine, directory):
            directory = None
        app = create_app(engine, settings, template, when_compiled=freeze)
        where, logging = dict(host=options.host, port=options.port), uvicorn.config.LOGGING_CONFIG
        server = make_server(app, settings.limits, **where, access_log=options.access_log, log_config=logging)
        name = settings.model_name
        if settings.warmup == "none":
            print(f"mamba-align: serving {name}; calls wait for the programs that they need", file=sys.stderr)
        else:
            print(f"mamba-align: compiling programs for {name}; /ready says when it is done", file=sys.stderr)
        run_server(server)
        if directory is not None:
            save_cache(engine, directory)
    return 0


def freeze() -> None:
    """Takes what exists now out of the garbage collector's reach, because it stays until the process ends.

    While the collector goes through all of it, the server does nothing else.
    """
    gc.collect()
    gc.freeze()


def restore_cache(engine: Any, directory: Path) -> bool:
    """Takes cached prefixes from a directory. If there are none, or they can't be used, the engine starts without them.

    A file that can't be used, because it is damaged or another model's, is set aside under another name. Returns
    whether the cache may be saved in the directory: no file is there that would be lost.
    """
    from mamba_align_jax.engine.running.transfer import FILE_NAME

    try:
        count = engine.load_cache(directory)
    except FileNotFoundError:
        return True
    except (ValueError, OSError) as error:
        print(f"mamba-align: the saved cache is skipped: {error}", file=sys.stderr)
        return _set_aside(directory / FILE_NAME)
    print(f"mamba-align: the prefixes saved in {directory} are cached again: {count} states", file=sys.stderr)
    return True


def _set_aside(file: Path) -> bool:
    """Gives a file another name that no file has. Returns whether it could."""
    names = (file.with_name(f"{file.name}.unused-{number}") for number in itertools.count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    try:
        file.rename(aside)
    except OSError as error:
        print(f"mamba-align: it stays, and the cache will not be saved: {error}", file=sys.stderr)
        return False
    print(f"mamba-align: it is kept as {aside}", file=sys.stderr)
    return True


def save_cache(engine: Any, directory: Path) -> None:
    """Saves an engine's cached prefixes in a directory. A failure is reported, because there is nothing else left to do."""
    try:
        engine.save_cache(directory)
    except Exception as error:
        print(f"mamba-align: the cache is not saved: {error!r}", file=sys.stderr)
    else:
        print(f"mamba-align: the cached prefixes are saved in {directory}", file=sys.stderr)


def make_config(options: argparse.Namespace) -> EngineConfig:
    """Returns what the options say of the engine.

    Raises:
        ValueError: An option has a wrong value. It has the option's name.
    """
    try:
        return EngineConfig(**given_fields(options, EngineConfig) | fields_of(options))
    except FieldError as error:
        raise error.renamed(NAMES.get(error.field, error.field)) from error


def make_template(options: argparse.Namespace) -> ChatTemplate | None:
    """Returns the chat template that the options name, or else the model's own. It raises what `run` raises."""
    text = options.chat_template
    if text is not None and not set("{}\n") & set(text):
        text = Path(text).read_text(encoding="utf8")
    return load_chat_template(options.model, text)


def _read_keys(name: str, file: Path | None) -> tuple[str, ...]:
    """Returns the keys of a file, which has one in each line; none without a file."""
    if file is None:
        return ()
    try:
        keys = tuple(line.strip() for line in file.read_text().splitlines() if line.strip())
    except UnicodeDecodeError as error:
        raise FieldError(name, "be a file of text", str(file), "must") from error
    if not keys:
        raise FieldError(name, "have a key in a line", str(file), "must")
    return keys


def make_settings(options: argparse.Namespace) -> Settings:
    """Returns what the options say of the server. It raises what `run` raises."""
    keys = [*options.api_key, *_read_keys("api_key_file", options.api_key_file)]
    defaults = {}
    if options.generation_config == "auto":
        from mamba_align_jax.models.config_files import read_sampling_defaults

        defaults = read_sampling_defaults(options.model)
    try:
        limits = Limits(**given_fields(options, Limits, "limit_"))
    except FieldError as error:
        raise error.renamed(f"limit_{error.field}") from error
    name, *aliases = options.served_model_name or [options.model_name]
    return Settings(
        model_name=name,
        model_aliases=tuple(aliases),
        allowed_hosts=tuple(options.allowed_host),
        seed=options.seed,
        api_keys=tuple(keys),
        admin_keys=_read_keys("admin_key_file", options.admin_key_file),
        sampling_defaults=defaults,
        min_priority=options.min_priority,
        warmup=options.warmup,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        limits=limits,
    )

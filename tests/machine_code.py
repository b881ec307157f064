"""Digests of every kernel's code, to prove that a refactoring changes no machine code.

    python tests/machine_code.py write before.json           # on the commit before
    python tests/machine_code.py write after.json            # on the commit after
    python tests/machine_code.py compare before.json after.json

Each case of `tests/kernels/lowered_cases.py` is lowered for an H200 by each implementation. The text of each kernel launch
(its Triton or Mosaic GPU module, its grid and its launch options) is hashed without source locations, and without the names
of the module and of its functions, because compilers derive neither instructions nor registers from them. Equal text means
equal machine code. Texts that differ may still compile to the same instructions.

It needs a JAX that lowers Mosaic GPU kernels without a GPU: Python 3.12 and JAX 0.11.2 or newer. Lowering all cases takes
about ten minutes of one core.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jaxlib.triton.dialect as triton_dialect
from jax._src.interpreters import mlir
from jax._src.lib import mosaic_gpu_dialect
from jax._src.lib.mlir import ir
from kernels import lowered_cases

from pallas_kernels import UnsupportedError

_H200 = "NVIDIA H200"
_CALL = re.compile(r"stablehlo\.custom_call @(__gpu\$xla\.gpu\.triton|mosaic_gpu_v2)\(.*")
_STRING = r'"((?:[^"\\]|\\.)*)"'
_MODULE = re.compile(rf"\b(ir|module) = {_STRING}")
_HASH = re.compile(rf"kernel_hash = {_STRING}")
_NAME = re.compile(rf"\bname = {_STRING}|@[\w.$]+|sym_name = {_STRING}|dump_basename = {_STRING}")
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)


def _bytes(text: str) -> bytes:
    """Undoes the escapes of a string in MLIR's text."""
    plain = {b"n": b"\n", b"t": b"\t"}
    return _ESCAPE.sub(lambda m: bytes([int(m[1], 16)]) if len(m[1]) == 2 else plain.get(m[1], m[1]), text.encode())


def _readable(module: bytes) -> str:
    """Returns the text of a module in bytecode, without locations."""
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    triton_dialect.register_dialect(context)
    mosaic_gpu_dialect.register_dialect(context)
    with context:
        return ir.Module.parse(module).operation.get_asm(enable_debug_info=False)


def kernels(text: str) -> list[str]:
    """Returns the code of each kernel launch in a lowered program, in order, without names and locations."""
    found = []
    for call in _CALL.finditer(text):
        module = _MODULE.search(call[0])
        readable = _NAME.sub("", _readable(_bytes(module[2])))
        # The operands' names depend on the program around the launch. Its options begin with the first brace.
        options = call[0][call[0].index("{") :].replace(module[0], "")
        found.append(_NAME.sub("", _HASH.sub("", options)) + readable)
    return found


def _cases():
    """Yields (name, function that lowers it) for each case and implementation."""
    implementations = ("triton", "mosaic_gpu")
    for (op, (run, named, _)), implementation in itertools.product(lowered_cases.EVERY.items(), implementations):
        for case, tokens in itertools.product(named, (1, 4, 16) if op == "product_chain" else (None,)):
            options = dict(implementation=implementation) | ({} if tokens is None else dict(tokens=tokens))
            name = f"{op} / {case.name} / {implementation}" + (f" / {tokens} tokens" if tokens else "")
            yield name, lambda run=run, case=case, options=options: run(_H200, case, **options)


def _write(path: Path, ops: list[str]) -> None:
    digests = {}
    for name, run in _cases():
        if ops and name.split(" / ")[0] not in ops:
            continue
        try:
            digests[name] = [hashlib.sha256(code.encode()).hexdigest()[:16] for code in kernels(run())]
        except (UnsupportedError, TypeError) as error:
            digests[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(name, digests[name], flush=True)
    path.write_text(json.dumps(digests, indent=0))


def _compare(before: Path, after: Path) -> int:
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    changed = [name for name in old.keys() & new.keys() if old[name] != new[name]]
    for title, names in dict(changed=changed, gone=old.keys() - new.keys(), new=new.keys() - old.keys()).items():
        for name in sorted(names):
            print(f"{title}: {name}: {old.get(name)} -> {new.get(name)}")
    print(f"{len(old.keys() & new.keys()) - len(changed)} cases have equal code, {len(changed)} do not")
    return bool(changed)


def main() -> int:
    """Writes digests, or compares two files of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("path", type=Path)
    write.add_argument("--op", action="append", default=[], help="only the cases of this op")
    compare = commands.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        return _compare(options.before, options.after)
    _write(options.path, options.op)
    return 0


if __name__ == "__main__":
    sys.exit(main())

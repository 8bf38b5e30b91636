"""JAX: a program that `jax.export` has serialized (StableHLO), for CPUs.

An input is named by its path in the arguments of the exported function: a dictionary's key, a keyword, or
`INPUT__<position>`; an output by its key, or `OUTPUT__<position>`. A nested path joins its parts by dots.
Parameter: `num_threads`.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qinfer.backends.frameworks.base import datatype_of, number, taken
from qinfer.backends.python_host.messages import DeclaredTensor, LoadFramework
from qinfer.backends.python_host.tensor import Array
from qinfer.errors import InferenceFailed, ModelLoadFailed


def load(asked: LoadFramework) -> "ExportedProgram":
    """Loads an exported program."""
    # The client of XLA for CPUs reads the size of its pool of threads from NPROC (xla/pjrt/utils.cc).
    os.environ["NPROC"] = str(number(asked, "num_threads", asked.threads))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_ENABLE_X64", "1")  # the program has the types of its export
    import jax
    from jax import export

    try:
        exported = export.deserialize(bytearray(Path(asked.path).read_bytes()))
    except Exception as error:  # of the file's format: a dozen classes
        raise ModelLoadFailed(f"jax can't load the program: {_first_line(error)}") from error
    if "cpu" not in exported.platforms:
        raise ModelLoadFailed(
            f"the program was exported for {', '.join(exported.platforms)}; export it with platforms=['cpu']"
        )
    return ExportedProgram(jax, exported, asked.max_batch_size)


class ExportedProgram:
    """An exported program, compiled for each shape of its inputs when that occurs first.

    Batches are filled up to powers of two with their last row: XLA takes seconds to compile a large program.
    """

    def __init__(self, jax: Any, exported: Any, max_batch_size: int) -> None:
        self._jax = jax
        self._run = jax.jit(exported.call)
        self._in_tree = exported.in_tree
        self._in_names = self._names(exported.in_tree, len(exported.in_avals), "INPUT", drops=1)
        self._out_names = self._names(exported.out_tree, len(exported.out_avals), "OUTPUT", drops=0)
        self._dtypes = [aval.dtype for aval in exported.in_avals]
        ports = (*exported.in_avals, *exported.out_avals)
        has_rows = all(aval.shape and not isinstance(aval.shape[0], int) for aval in ports)
        self._most_rows = max_batch_size if has_rows else 0
        self.inputs: Sequence[DeclaredTensor] = list(map(_declared, self._in_names, exported.in_avals))
        self.outputs: Sequence[DeclaredTensor] = list(map(_declared, self._out_names, exported.out_avals))

    def execute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Runs the program."""
        arrays = [taken(inputs, n).astype(d, copy=False) for n, d in zip(self._in_names, self._dtypes, strict=True)]
        rows = len(arrays[0]) if self._most_rows else 0
        more = min(1 << (rows - 1).bit_length(), self._most_rows) - rows if rows else 0
        if more > 0:
            arrays = [np.concatenate([each, np.repeat(each[-1:], more, axis=0)]) for each in arrays]
        args, keywords = self._jax.tree_util.tree_unflatten(self._in_tree, arrays)
        try:
            outputs = self._jax.tree_util.tree_leaves(self._run(*args, **keywords))
            part = slice(rows) if more > 0 else ...
            found = {
                name: np.asarray(each)[part]
                for name, each in zip(self._out_names, outputs, strict=True)
                if name in wanted
            }
        except (ValueError, TypeError, RuntimeError) as error:
            raise InferenceFailed(f"jax error: {_first_line(error)}") from error
        return found

    def _names(self, tree: Any, leaves: int, word: str, *, drops: int) -> list[str]:
        """Returns a name for each leaf; `drops` leaves out the parts that tell arguments and keywords apart."""
        util = self._jax.tree_util
        paths = [path for path, _ in util.tree_flatten_with_path(util.tree_unflatten(tree, range(leaves)))[0]]
        names = [[_part(key) for key in path[drops:]] for path in paths]
        lone = len({parts[0] for parts in names if parts}) == 1
        if lone and all(len(parts) > 1 for parts in names):
            names = [parts[1:] for parts in names]  # one argument with all tensors
        return [
            f"{word}__{position}" if all(part.isdecimal() for part in parts) else ".".join(parts)
            for position, parts in enumerate(names)
        ]


def _part(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _declared(name: str, aval: Any) -> DeclaredTensor:
    dims = tuple(d if isinstance(d, int) else -1 for d in aval.shape)
    return DeclaredTensor(name, datatype_of(name, aval.dtype), dims)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

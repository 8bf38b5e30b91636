"""`reshape` of a configuration: the model sees another shape than the client (reference §3.2). Pure.

Variable dimensions of the two shapes correspond in order: `[-1, 4, -1]` and `[-1, 2, 2, -1]`.
"""

from typing import NamedTuple

from qinfer.models.spec import ModelSpec

Dims = tuple[int, ...]


class Reshape(NamedTuple):
    """A tensor's change of shape, without the batch dimension; -1 is variable."""

    before: Dims
    after: Dims
    batched: bool

    def apply_to(self, shape: Dims) -> Dims:
        """Returns the new shape; a missing variable dimension becomes 0."""
        lead = 1 if self.batched else 0
        sizes = iter([size for size, dim in zip(shape[lead:], self.before, strict=False) if dim == -1])
        return shape[:lead] + tuple([next(sizes, 0) if dim == -1 else dim for dim in self.after])


def inward(spec: ModelSpec) -> dict[str, Reshape]:
    """Returns the inputs' changes."""
    batched = spec.max_batch_size > 0
    return {i.name: Reshape(i.dims, i.reshape, batched) for i in spec.inputs if i.reshape is not None}


def outward(spec: ModelSpec) -> dict[str, Reshape]:
    """Returns the outputs' changes."""
    batched = spec.max_batch_size > 0
    return {o.name: Reshape(o.reshape, o.dims, batched) for o in spec.outputs if o.reshape is not None}

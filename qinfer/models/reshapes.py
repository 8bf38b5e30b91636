"""`reshape` of a configuration: what the client sees as `dims`, the model sees as another shape (reference §3.2). Pure.

Elements stay in place: only shapes change. Variable dimensions of the one shape become those of the other in their
order: `[-1, 4, -1]` and `[-1, 2, 2, -1]`.
"""

from typing import NamedTuple

from qinfer.models.spec import ModelSpec

Dims = tuple[int, ...]


class Reshape(NamedTuple):
    """The change of a tensor's shape.

    Attributes:
        before: Its dimensions before, without the batch dimension; -1 is variable.
        after: Those behind, of as many elements.
        batched: Whether it has a batch dimension, which stays.
    """

    before: Dims
    after: Dims
    batched: bool

    def of(self, shape: Dims) -> Dims:
        """Returns what becomes of a shape.

        A variable dimension that the shape lacks has no elements, so that the shapes differ in size.
        """
        lead = 1 if self.batched else 0
        sizes = iter([size for size, dim in zip(shape[lead:], self.before, strict=False) if dim == -1])
        return shape[:lead] + tuple([next(sizes, 0) if dim == -1 else dim for dim in self.after])


def inward(spec: ModelSpec) -> dict[str, Reshape]:
    """Returns the changes on the way from the client to the model, by its inputs."""
    batched = spec.max_batch_size > 0
    return {i.name: Reshape(i.dims, i.reshape, batched) for i in spec.inputs if i.reshape is not None}


def outward(spec: ModelSpec) -> dict[str, Reshape]:
    """Returns the changes on the way from the model to the client, by its outputs."""
    batched = spec.max_batch_size > 0
    return {o.name: Reshape(o.reshape, o.dims, batched) for o in spec.outputs if o.reshape is not None}

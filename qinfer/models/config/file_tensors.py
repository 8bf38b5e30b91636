"""What a model file declares of its inputs and outputs, whatever its format."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """An input or output as the model file declares it.

    Attributes:
        name: Its name.
        datatype: Its wire datatype.
        dims: All its dimensions, the batch dimension included; -1 is symbolic or unknown. `None`: even their number is
            unknown.
    """

    name: str
    datatype: str
    dims: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensors:
    """What a model file declares, in its own order."""

    inputs: tuple[FileTensor, ...]
    outputs: tuple[FileTensor, ...]

    @property
    def batchable(self) -> bool:
        """Tells whether every input and output has a variable first dimension, which Triton takes for the batch's."""
        return all(t.dims and t.dims[0] == -1 for t in self.inputs + self.outputs)

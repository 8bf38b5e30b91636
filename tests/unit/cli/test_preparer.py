"""What the process that prepares a start answers over its pipe: values and errors as they were, and nothing pickled."""

import pytest

from qinfer import errors
from qinfer.cli.console import CommandFailed
from qinfer.cli.local.deployment import _Answer


@pytest.mark.parametrize(
    "error",
    [
        errors.SettingsError("QINFER_HTTP__PORT=70000: too large"),
        errors.Overloaded("too many"),
        ModuleNotFoundError("No module named 'redis'", name="redis"),
        ImportError("no such name"),
        FileNotFoundError(2, "No such file or directory", "/nowhere"),
        PermissionError(13, "Permission denied"),
    ],
)
def test_errors_arrive_as_they_were(error: Exception) -> None:
    """The class decides the exit code, the text and the module are shown."""
    raised = _Answer.from_error(error).raised()

    assert (type(raised), str(raised)) == (type(error), str(error))
    assert getattr(raised, "name", None) == getattr(error, "name", None)


def test_an_error_of_another_module_arrives_as_the_nearest_that_is_known() -> None:
    raised = _Answer.from_error(CommandFailed("it failed")).raised()

    assert (type(raised), str(raised)) == (errors.QinferError, "it failed")

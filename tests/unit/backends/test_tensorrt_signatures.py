"""What the tensorrt backend is type-checked against is what the bindings of TensorRT 10 offer.

The wheel `tensorrt_cu12_bindings` has the Python module without TensorRT's libraries. Empty libraries of their names
let it be imported: enough to read its signatures, and nothing of it can run.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

STUB = Path(__file__).parents[3] / "typings" / "tensorrt.pyi"
LIBRARIES = ("libnvinfer.so.10", "libnvinfer_plugin.so.10", "libnvonnxparser.so.10")
READ = """
import json, sys, tensorrt_bindings as trt
found = {}
for path in json.load(sys.stdin):
    member = trt
    for part in path.split("."):
        member = getattr(member, part, None)
    found[path] = None if member is None else (getattr(member, "__doc__", None) or "")
json.dump(found, sys.stdout)
"""


def declared() -> dict[str, list[str] | None]:
    """Reads the stub: `Class.method` → its parameters' names; `None` for anything else."""
    members: dict[str, list[str] | None] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            members[node.name] = [argument.arg for argument in node.args.args]
        elif isinstance(node, ast.ClassDef):
            members[node.name] = None
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("__"):
                    is_property = bool(member.decorator_list)
                    names = [argument.arg for argument in member.args.args]
                    members[f"{node.name}.{member.name}"] = None if is_property else names
                elif isinstance(member, ast.AnnAssign | ast.Assign):
                    target = member.target if isinstance(member, ast.AnnAssign) else member.targets[0]
                    assert isinstance(target, ast.Name)
                    members[f"{node.name}.{target.id}"] = None
    return members


@pytest.fixture(scope="module")
def documentation(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The docstring of each declared member in the real bindings; `None` where there is no such member."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or find_spec("tensorrt_bindings") is None:
        pytest.skip("needs a C compiler and tensorrt_cu12_bindings")
    directory = tmp_path_factory.mktemp("libraries")
    functions = (
        "createInferBuilder_INTERNAL createInferRefitter_INTERNAL createInferRuntime_INTERNAL getPluginRegistry "
        "createNvOnnxParserRefitter_INTERNAL createNvOnnxParser_INTERNAL getBuilderPluginRegistry "
        "getNvOnnxParserVersion initLibNvInferPlugins"
    )
    source = "".join(f"void* {name}(void) {{ return 0; }}\n" for name in functions.split())
    for library in LIBRARIES:
        output = str(directory / library)
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{library}", "-o", output]
        subprocess.run(command, input=source, text=True, check=True)
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=json.dumps(list(declared())),
        env=os.environ | {"LD_LIBRARY_PATH": str(directory)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def test_every_member_exists(documentation: dict[str, str | None]) -> None:
    """Nothing is used that the bindings have not."""
    assert [path for path, text in documentation.items() if text is None] == []


def test_parameters_have_their_names_and_order(documentation: dict[str, str | None]) -> None:
    """Every method takes what the stub says, in one of its overloads."""
    wrong = {}
    for path, parameters in declared().items():
        if parameters is None:
            continue
        text = documentation[path] or ""
        overloads = [
            re.findall(r"(?:^|, )(\w+):", signature)
            for signature in re.findall(rf"{path.rpartition('.')[2]}\((.*)\) ->", text)
        ]
        if parameters not in overloads:
            wrong[path] = (parameters, overloads)
    assert wrong == {}

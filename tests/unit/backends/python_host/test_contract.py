"""The python backend keeps the contract of backends."""

from dataclasses import replace
from pathlib import Path

from qinfer.backends.python import PythonBackend
from qinfer.models.config import config
from qinfer.models.spec import ModelSpec
from qinfer.testing.backend_contract import ALL_DATATYPES, BackendContract
from tests.support.python_models import CONFIG, execute


class TestContract(BackendContract):
    datatypes = ("FP32", *(name for name in ALL_DATATYPES if name not in ("FP32", "BF16")))

    def create(self) -> PythonBackend:
        return PythonBackend()

    def write(self, version_dir: Path, datatype: str, factor: int) -> ModelSpec:
        value = "x(r)" if factor == 1 else f"x(r) * np.float32({factor})"
        (version_dir / "model.py").write_text(execute(f"return [reply({value}) for r in requests]"))
        return self._spec(datatype, 2)

    def write_ragged(self, version_dir: Path) -> ModelSpec:
        self.write(version_dir, "FP32", 1)
        spec = self._spec("FP32", -1)
        return replace(spec, inputs=(replace(spec.inputs[0], ragged=True),))

    def _spec(self, datatype: str, width: int) -> ModelSpec:
        names = {"name": "m", "max_batch_size": 8, "scheduling": "", "more": "", "dims": width}
        text = CONFIG.format(datatype=datatype.replace("BYTES", "STRING"), **names)
        return config.to_spec(config.normalise(config.parse(text), "m", ["model.py"]))

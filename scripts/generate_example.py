"""Makes the files of `qinfer example digits` of `examples/digits.py`: the model, and images that it was not trained on.

    python -m scripts.generate_example

They are part of the package, so that neither scikit-learn nor a clone is needed. A test checks the model's answers.
"""

import json
import shutil
import tempfile
from pathlib import Path

from examples import digits

ROWS = 100
FOLDER = Path(__file__).resolve().parent.parent / "qinfer" / "cli" / "example" / "digits"


def main() -> None:
    """Writes the files."""
    with tempfile.TemporaryDirectory() as work:
        made = digits.build(Path(work))
        shutil.copy(made.model_path, FOLDER / "model.onnx")
        shutil.copy(made.model_path.parent.parent / "config.pbtxt", FOLDER / "config.pbtxt")
    pairs = zip(made.images[:ROWS].astype(int).tolist(), made.labels[:ROWS].tolist(), strict=True)
    rows = ({"id": number, "digit": label, "pixels": pixels} for number, (pixels, label) in enumerate(pairs))
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    (FOLDER / "digits.jsonl").write_text(text)


if __name__ == "__main__":
    main()

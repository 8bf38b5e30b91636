"""Puts the scripts of others into the console's static files: from npm, verified by their hashes.

    python -m scripts.console_files

`SOURCE.json` beside the files names each package, its version, npm's hash of its archive, its licence, and a hash of
each file, which a test compares. For another version, change `version` and `integrity`, which
`npm view NAME@VERSION dist.integrity` prints.
"""

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from scripts.swagger_ui import integrity_of

TARGET = Path(__file__).resolve().parent.parent / "api" / "qinfer_api" / "console" / "static"
SOURCE = TARGET / "SOURCE.json"


def fetch(package: dict[str, Any]) -> None:
    """Writes the files of a package; exits if its archive has another hash."""
    with tempfile.TemporaryDirectory() as directory:
        name = f"{package['package']}@{package['version']}"
        words = ["npm", "pack", "--silent", "--pack-destination", directory, name]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(directory).glob("*.tgz")
        found = integrity_of(path.read_bytes())
        if found != package["integrity"]:
            sys.exit(f"console_files: the archive of {name} has the hash {found}, not {package['integrity']}")
        with tarfile.open(path) as archive:
            for target, file in package["files"].items():
                member = archive.extractfile(f"package/{file['from']}")
                assert member is not None
                content = member.read()
                file["sha256"] = hashlib.sha256(content).hexdigest()
                (TARGET / target).write_bytes(content)
    print(f"console_files: wrote {name}")


def main() -> int:
    """Fetches, verifies and writes the files."""
    packages = json.loads(SOURCE.read_text())
    for package in packages:
        fetch(package)
    SOURCE.write_text(json.dumps(packages, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

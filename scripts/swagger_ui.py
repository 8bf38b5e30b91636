"""Puts Swagger UI into the gateway's package, as `/docs` serves it: from npm, verified by its hash, compressed.

    python -m scripts.swagger_ui

`SOURCE.json` beside the files names the package, its version, npm's hash of its archive, and a hash of each file, which
a test compares. For another version, change `version` and `integrity`, which `npm view swagger-ui-dist@VERSION
dist.integrity` prints.
"""

import base64
import gzip
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "api" / "qinfer_api" / "rest" / "swagger_ui"
SOURCE = TARGET / "SOURCE.json"
COMPRESSED = ("swagger-ui-bundle.js", "swagger-ui.css")
LICENCES = ("LICENSE", "NOTICE", "swagger-ui-bundle.js.LICENSE.txt")


def content_of(name: str) -> bytes:
    """Returns the content that a file of the package has in npm's."""
    packed = TARGET / f"{name}.gz"
    return gzip.decompress(packed.read_bytes()) if packed.exists() else (TARGET / name).read_bytes()


def integrity_of(archive: bytes) -> str:
    """Returns npm's hash of an archive."""
    return "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()


def main() -> int:
    """Fetches, verifies and writes the files."""
    source = json.loads(SOURCE.read_text())
    with tempfile.TemporaryDirectory() as directory:
        words = ["npm", "pack", "--silent", "--pack-destination", directory, f"{source['package']}@{source['version']}"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(directory).glob("*.tgz")
        found = integrity_of(path.read_bytes())
        if found != source["integrity"]:
            print(f"swagger_ui: the archive has the hash {found}, not {source['integrity']}", file=sys.stderr)
            return 1
        with tarfile.open(path) as archive:
            for name in (*COMPRESSED, *LICENCES):
                member = archive.extractfile(f"package/{name}")
                assert member is not None
                content = member.read()
                source["files"][name] = hashlib.sha256(content).hexdigest()
                if name in COMPRESSED:
                    (TARGET / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
                else:
                    (TARGET / name).write_bytes(content)
    SOURCE.write_text(json.dumps(source, indent=2) + "\n")
    print(f"swagger_ui: wrote {source['package']} {source['version']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

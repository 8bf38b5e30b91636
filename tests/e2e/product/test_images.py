"""The images for CPUs, built and run with what the machine has: `scripts/images`."""

import shutil
import subprocess

import pytest

from scripts import try_images
from scripts.containers import ROOT, Buildah, ImageFailed, find_engine

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]  # a base, two environments, and seven images


def test_each_image_is_built_and_serves() -> None:
    """As uid 10001, healthy by its own check, until SIGTERM; the table has a line for each."""
    try:
        engine = find_engine()
    except ImageFailed as error:
        pytest.skip(str(error))
    if isinstance(engine, Buildah) and not shutil.which("debootstrap"):
        pytest.skip("buildah has no base image without debootstrap")

    done = subprocess.run([ROOT / "scripts" / "images"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"\n{target} " in done.stdout for target in try_images.TARGETS)

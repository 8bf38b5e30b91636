"""How busy the machine is."""

from pathlib import Path

import pytest

from qinfer.observe.host import HostMeter, HostUse


def write(proc: Path, stat: str, available_kib: int = 250) -> None:
    (proc / "stat").write_text(f"cpu  {stat}\ncpu0 9 9 9 9 9 9 9 9 9 9\n")
    (proc / "meminfo").write_text(f"MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: {available_kib} kB\n")


def test_cpu_since_the_reading_before(tmp_path: Path) -> None:
    """Waiting for disks is idle; what guests take is counted once; nothing passed is as it was."""
    write(tmp_path, "100 0 100 700 100 0 0 0 50 0")
    meter = HostMeter(tmp_path)
    write(tmp_path, "108 4 105 750 110 1 1 1 55 0", 400)

    first, again = meter.read(), meter.read()
    write(tmp_path, "108 4 105 760 110 1 1 1 55 0", 400)

    assert first == again == HostUse(0.25, 1000 * 1024, 600 * 1024)
    assert meter.read() == HostUse(0.0, 1000 * 1024, 600 * 1024)


@pytest.mark.parametrize("stat", ["", "a b c d e f g h", "1 2 3"])
def test_a_kernel_that_does_not_tell(tmp_path: Path, stat: str) -> None:
    """No numbers rather than wrong ones."""
    assert HostMeter(tmp_path / "nowhere").read() is None

    write(tmp_path, stat)

    assert HostMeter(tmp_path).read() is None


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux tells")
def test_this_machine() -> None:
    """It has memory, of which some is used."""
    use = HostMeter().read()

    assert use is not None
    assert 0 <= use.cpu <= 1
    assert 0 < use.memory_used_bytes < use.memory_total_bytes

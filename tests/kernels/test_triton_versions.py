"""What concerns Triton once more under the oldest and the newest version that the kernels are written for. Slow."""

import subprocess
import sys
from pathlib import Path

import pytest
import triton
from kernel_cases import TRITON

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))
try:
    import triton_versions
finally:
    sys.path.pop(0)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(TRITON, reason="it starts its own interpreter")
@pytest.mark.parametrize("version", triton_versions.VERSIONS.split(","))
def test_other_versions(version):
    if version == triton.__version__:
        pytest.skip("the other tests run with it")
    folder = REPOSITORY / ".triton-versions"
    try:
        triton_versions.overlay(version, folder)
    except subprocess.CalledProcessError:
        pytest.skip(f"triton {version} cannot be installed here")
    assert triton_versions.run(version, folder, []) == 0

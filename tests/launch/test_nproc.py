from __future__ import annotations

import os

import pytest

from rdzv.errors import SettingsError
from rdzv.launch.nproc import Devices, count, visible

CPUS_ONLY, GPUS = Devices(6, 0, "nowhere"), Devices(6, 4, "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("text", "devices", "workers"),
    [
        ("1", CPUS_ONLY, 1), ("8", GPUS, 8), (" 2 ", GPUS, 2), ("1024", GPUS, 1024),
        ("cpu", CPUS_ONLY, 6), ("cpu", GPUS, 6), ("gpu", GPUS, 4), ("auto", GPUS, 4), ("auto", CPUS_ONLY, 6), ("GPU", GPUS, 4),
    ],
)  # fmt: skip
def test_a_number_stands_for_itself_and_a_word_for_what_the_node_has(text, devices, workers):
    assert count(text, devices) == workers


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1025", "99999999999", "", "tpu", "²", "two"])
def test_any_other_text_is_refused_with_what_is_allowed(text):
    with pytest.raises(SettingsError, match=r"must be a number from 1 to 1024, or auto, gpu or cpu"):
        count(text, GPUS)


def test_gpu_without_a_gpu_is_refused_with_the_places_that_were_looked_at(tmp_path):
    devices = Devices.here({}, tmp_path)
    with pytest.raises(SettingsError, match=r"shows no GPU \(looked at CUDA_VISIBLE_DEVICES, .*/dev/nvidia\* and /sys"):
        count("gpu", devices)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, (3, "CUDA_VISIBLE_DEVICES")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937, MIG-1"}, (2, "CUDA_VISIBLE_DEVICES")),
        ({"CUDA_VISIBLE_DEVICES": ""}, (0, "CUDA_VISIBLE_DEVICES")),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, (0, "CUDA_VISIBLE_DEVICES")),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, (1, "CUDA_VISIBLE_DEVICES")),
        ({"ROCR_VISIBLE_DEVICES": "0,1"}, (2, "ROCR_VISIBLE_DEVICES")),
        ({"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0"}, (1, "HIP_VISIBLE_DEVICES")),
    ],
)
def test_visible_gpus_are_counted_as_the_drivers_read_the_variable(environ, found):
    assert visible(environ) == found


def test_files_of_the_drivers_are_counted_if_no_variable_names_gpus(tmp_path):
    cpus = len(os.sched_getaffinity(0))
    for number, units in enumerate((0, 0, 256, 256, 304)):  # Two CPUs and three GPUs, as AMD's driver lists them.
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\nsimd_count {units}\nmem_banks_count 1\n")
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/9/properties").mkdir(parents=True)  # Unreadable.
    assert Devices.here({}, tmp_path) == Devices(cpus, 3, "/sys/class/kfd/kfd/topology/nodes")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev" / name).touch()
    assert Devices.here({}, tmp_path) == Devices(cpus, 2, "/dev/nvidia*")
    assert Devices.here({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == Devices(cpus, 1, "CUDA_VISIBLE_DEVICES")
